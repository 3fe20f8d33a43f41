"""Where things are in the reader's copy of the series."""

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
