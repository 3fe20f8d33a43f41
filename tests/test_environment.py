"""One list of packages, one range of Pythons, one test command, wherever they are named."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads(text("pyproject.toml"))["project"]


@pytest.fixture(scope="module")
def pythons(project):
    """The supported versions, such as ["3.10", "3.11"]."""
    allowed = SpecifierSet(project["requires-python"])
    return [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]


def test_conda_gives_the_packages_of_pyproject(project):
    *conda, from_pip = yaml.safe_load(text("environment.yml"))["dependencies"]
    python, pip = (Requirement(line) for line in conda)
    assert (python.name, pip.name) == ("python", "pip")
    assert python.specifier == SpecifierSet(project["requires-python"])
    # No package is named here, so none can have another version than there.
    assert from_pip == {"pip": ["-e .[dev]"]}
    assert project["optional-dependencies"].keys() == {"dev"}


def test_setup_installs_the_same(pythons):
    script = text("tools/setup.sh")
    assert re.findall(r'pip install -e "?([^"\s]+)', script) == [".[dev]"]
    low, high = re.search(r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", script).groups()
    assert pythons == [f"3.{minor}" for minor in range(int(low), int(high))] == ["3.10", "3.11", "3.12", "3.13"]
    assert f"Python {pythons[0]} to {pythons[-1]}" in script


def test_packages_of_the_design_have_a_floor_and_no_ceiling(project):
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    packages = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    assert packages.keys() >= {"torch", "torchvision", "jupyterlab", "nbval", "matplotlib", "tqdm", "filelock"}
    assert packages["torch"] == ">=2.6"
    assert [name for name, range in packages.items() if not re.fullmatch(r">=[\d.]+", range)] == []


def test_the_test_command_is_the_same_everywhere(pythons):
    workflow = yaml.safe_load(text(".github/workflows/test.yml"))
    job = workflow["jobs"]["test"]
    assert [pythons[0], pythons[-1]] == job["strategy"]["matrix"]["python"]
    assert job["steps"][-1]["run"] == "bash .ci/run"
    assert text(".ci/run").splitlines()[-1] == "make test"
    assert "make test" in text("README.md")
