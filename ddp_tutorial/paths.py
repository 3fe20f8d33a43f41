"""Where things are in the reader's copy of the series."""

import importlib.util
from pathlib import Path


def _is_root(folder):
    has_lessons = (folder / "scripts").is_dir() or (folder / "notebooks").is_dir()
    return has_lessons and (folder / "pyproject.toml").is_file() and (folder / "ddp_tutorial").is_dir()


def project_root():
    """The series' top folder: the nearest one at or above the current folder, else the one that holds this package."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if _is_root(folder):
            return folder
    return Path(__file__).resolve().parents[1]


def build_dir():
    """The folder for everything made by running the series (git-ignored); created where it is missing."""
    folder = project_root() / "build"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_script(step):
    """The script of `step` ("07") as a module, without running its main(). Raises ValueError where there is none."""
    found = sorted((project_root() / "scripts").glob(f"{step}_*.py"))
    if len(found) != 1:
        raise ValueError(f"{len(found)} scripts begin with {step}_: name one step, as in load_script('07')")
    spec = importlib.util.spec_from_file_location(f"script_{step}", found[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
