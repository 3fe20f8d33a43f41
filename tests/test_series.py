"""`make setup`, `make run`, `make outputs`, `make reset` and nbval's rules, tried on small projects."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from ddp_tutorial.data import DataError
from tools import series

ROOT = Path(__file__).resolve().parent.parent


def save(path, *cells, outputs=()):
    """A notebook of code cells; a cell is its source, or its source, output and tags."""
    cells = [(cell, "") if isinstance(cell, str) else cell for cell in cells]
    code = [
        new_code_cell(
            source,
            outputs=[new_output("stream", text=output)] if output else [],
            metadata={"tags": tags},
            execution_count=count,
        )
        for count, (source, output, *tags) in enumerate(cells, 1)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell(f"# About {path.stem}"), *code]), path)
    return path


def call(folder, *command, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


# --------------------------------------------------------------------------------------------------------------- nbval


def test_nbval_fails_what_must_fail(tmp_path):
    for name in ("pyproject.toml", "conftest.py", "nbval.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    ignore = "nbval-ignore-output"
    save(
        tmp_path / "notebooks" / "00_first.ipynb",
        ("print('same')", "same\n"),
        ("print('new')", "old\n"),  # differs
        ("print('new')", "old\n", ignore),
        ("%%nonexistent x\n1", ""),  # unknown magics, compared and not
        ("%%nonexistent x\n1", "", ignore),
        ("%nonexistent", "", ignore),
        ("import sys; print('now', file=sys.stderr); print('same')", "same\n"),
        ("1 / 0", "", ignore),  # raises
    )
    save(tmp_path / "notebooks" / "01_second.ipynb", ("print('same')", "same\n"))
    save(tmp_path / "notebooks" / "solutions" / "01_second.ipynb", ("print('same')", "same\n"))

    done = call(tmp_path, sys.executable, "-m", "pytest", "-v", "notebooks")
    ran = re.findall(r"^notebooks/(\S+?)(?:\.|::)ipynb::Cell (\d) (PASSED|FAILED)", done.stdout, re.MULTILINE)
    assert [(name, int(cell)) for name, cell, _ in ran] == [
        *(("00_first", cell) for cell in range(8)),
        ("01_second", 0),
        ("solutions/01_second", 0),
    ]
    assert [int(cell) for _, cell, how in ran if how == "FAILED"] == [1, 3, 4, 5, 7]
    assert done.returncode == 1

    one = call(tmp_path, sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", "01_")
    assert re.findall(r"(\S+?)(?:\.|::)ipynb", one.stdout) == ["notebooks/01_second", "notebooks/solutions/01_second"]


# ----------------------------------------------------------------------------------------------------------------- run


def run(project, *arguments):
    return call(project, sys.executable, "tools/series.py", "run", *arguments)


def test_run_stops_at_the_first_failure_and_keeps_what_ran(project):
    picture = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('headline: 98 % & more')"
    first = save(project / "notebooks" / "00_first.ipynb", "print('one', end='\\r')\nprint('two')", picture)
    save(project / "notebooks" / "01_second.ipynb", "1", "print('just now')\nraise ValueError('too bad')")
    save(project / "notebooks" / "02_third.ipynb", "open('ran', 'w')")
    before = first.read_bytes()

    done = run(project)

    assert done.returncode == 1
    assert re.findall(r"^notebook (\d) of 3: (\w+) \.\.\. \d+ s$", done.stdout, re.MULTILINE) == [
        ("1", "00_first"),
        ("2", "01_second"),
    ]
    table = re.findall(r"^(\w+) +(\d+|seconds)  (.*)$", done.stdout, re.MULTILINE)
    assert [(name, result) for name, _, result in table] == [
        ("notebook", "headline"),
        ("00_first", "98 % & more"),
        ("01_second", "FAILED"),
    ]
    assert done.stderr.startswith("\n01_second failed at cell 2 of 2:")
    assert "raise ValueError" in done.stderr and "just now" in done.stderr
    assert done.stderr.endswith("\nValueError: too bad\n")

    assert first.read_bytes() == before
    assert not (project / "notebooks" / "ran").exists()
    results = project / "build" / "notebooks"
    assert {path.name for path in results.iterdir()} == {
        f"{name}.{end}" for name in ("00_first", "01_second") for end in ("html", "ipynb")
    }
    executed = nbformat.read(results / "00_first.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text == "two\n"
    assert executed.cells[2].outputs[0].data["image/png"]

    page = (results / "00_first.html").read_text()
    assert "98 % &amp; more" in page and 'src="data:image/png;base64,' in page
    assert "<script" not in page and not re.search(r'(src|href)="?http|@import|url\(["\']?http', page)
    index = (project / "build" / "index.html").read_text()
    assert "About 00_first</a>" in index and "98 % &amp; more" in index and "FAILED" in index
    links = re.findall(r'href="([^"]+)"', index)
    assert len(links) == 4 and all((project / "build" / link).exists() for link in links)


def test_run_of_one_notebook(tmp_path, capsys):
    save(tmp_path / "notebooks" / "00_first.ipynb", "1 / 0")
    save(tmp_path / "notebooks" / "01_second.ipynb", "print('headline: old')\nprint('headline: fine')")
    assert series.run(tmp_path, "01") == 0
    said = capsys.readouterr()
    assert said.out.startswith("notebook 1 of 1: 01_second ...") and said.err == ""
    assert re.search(r"^01_second +\d+  fine$", said.out, re.MULTILINE)


def test_an_unknown_number_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["series.py", "run", "77"])
    with pytest.raises(SystemExit) as stopped:
        series.main()
    assert stopped.value.code == 2
    assert "no notebook is called notebooks/77_*.ipynb" in capsys.readouterr().err


def test_interrupted_run_leaves_no_kernel(project):
    note = "import os\nopen('pid.part', 'w').write(str(os.getpid()))\nos.rename('pid.part', 'pid')"
    save(project / "notebooks" / "00_first.ipynb", f"{note}\nimport time\ntime.sleep(100)")
    running = subprocess.Popen(
        [sys.executable, "tools/series.py", "run"], cwd=project, stderr=subprocess.PIPE, text=True
    )
    pid = project / "notebooks" / "pid"
    wait_until(pid.exists, 60)
    running.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, said = running.communicate(timeout=30)
    assert (running.returncode, said) == (130, "\nstopped\n")
    assert time.monotonic() - start < 10
    kernel = int(pid.read_text())
    wait_until(lambda: not alive(kernel), 5)


def wait_until(true, seconds):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- outputs


@pytest.fixture
def with_mnist(monkeypatch):
    monkeypatch.setattr("ddp_tutorial.data.load_datasets", lambda data, say: None)


def test_outputs_are_the_same_every_time(tmp_path, with_mnist):
    path = save(tmp_path / "notebooks" / "00_first.ipynb", ("print('a')\nprint('b')", "old\n", "nbval-ignore-output"))
    solution = save(tmp_path / "notebooks" / "solutions" / "00_first.ipynb", "import math", "math.pi")
    written = nbformat.read(path, as_version=4)
    written.metadata["language_info"] = {"name": "python", "version": "3.9.9"}
    written.cells[1].metadata["execution"] = {"iopub.status.busy": "2020-01-01"}
    nbformat.write(written, path)
    ids = [cell.id for cell in written.cells]

    assert series.outputs(tmp_path) == 0
    once = path.read_bytes(), solution.read_bytes()
    assert series.outputs(tmp_path, "00") == 0
    assert (path.read_bytes(), solution.read_bytes()) == once

    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == ids
    assert notebook.cells[1].outputs == [{"output_type": "stream", "name": "stdout", "text": "a\nb\n"}]
    assert notebook.cells[1].metadata == {"tags": ["nbval-ignore-output"]}
    assert notebook.metadata.language_info == {"name": "python"}
    assert once[0].endswith(b"}\n") and b"\n  {\n" in once[0]
    assert [cell.get("execution_count") for cell in nbformat.read(solution, as_version=4).cells] == [None, 1, 2]


def test_outputs_not_fit_to_be_committed_are_refused(tmp_path, with_mnist, capsys):
    path = save(
        tmp_path / "notebooks" / "00_first.ipynb",
        "import os, sys; print('careful', file=sys.stderr)",
        "print(os.__file__)",
        "print(object())",
    )
    before = path.read_bytes()
    assert series.outputs(tmp_path) == 1
    said = capsys.readouterr().err
    assert "cell 1 wrote to stderr: careful\ncell 2 shows the machine" in said
    assert "cell 3 shows the machine (object at 0x)" in said
    assert path.read_bytes() == before


def test_outputs_refuse_a_magic_that_does_not_exist(tmp_path, with_mnist, capsys):
    path = save(tmp_path / "notebooks" / "00_first.ipynb", "%%nonexistent x\n1", "print('not reached')")
    before = path.read_bytes()
    assert series.outputs(tmp_path) == 1
    said = capsys.readouterr().err
    assert "failed at cell 1 of 2" in said and "`%%nonexistent` not found" in said
    assert path.read_bytes() == before


def test_outputs_need_the_real_mnist(tmp_path, monkeypatch, capsys):
    def load_datasets(data, say):
        assert data == "mnist"
        raise DataError("Put it there.")

    monkeypatch.setattr("ddp_tutorial.data.load_datasets", load_datasets)
    path = save(tmp_path / "notebooks" / "00_first.ipynb", "print(1)")
    before = path.read_bytes()
    assert series.outputs(tmp_path) == 2
    assert capsys.readouterr().err == "Committed outputs are those of the real MNIST. Put it there.\n"
    assert path.read_bytes() == before


def test_machine_names_are_found():
    notebook = new_notebook(cells=[new_code_cell("", outputs=[new_output("stream", text="rank 0 on horse7.\n")])])
    assert series.output_problems(notebook) == []
    assert "horse7" in series.output_problems(notebook, [r"\bhorse7\b"])[0]


# --------------------------------------------------------------------------------------------------------------- reset


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = call(folder, "git", *identity, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def clone(project):
    for name in ("scripts/a.py", "scripts/b.py", "scripts/c d.py", "notebooks/a.ipynb", "other.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(f"{name} as committed")
    (project / ".gitignore").write_text("/build/\n*.log\n")
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", "start")
    return project


def reset(project):
    return call(project, sys.executable, "tools/reset.py")


def test_reset_saves_then_restores(clone):
    edits = {
        "scripts/a.py": "edited",
        "scripts/c d.py": "edited and staged",
        "scripts/new é.py": "added",
        "notebooks/solutions/new.ipynb": "added and staged",
    }
    for name, text in edits.items():
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text(text)
    git(clone, "add", "scripts/c d.py", "notebooks/solutions")
    git(clone, "rm", "--quiet", "scripts/b.py")
    (clone / "other.py").write_text("not the series' own")
    (clone / "scripts" / "x.log").write_text("ignored")

    done = reset(clone)

    assert (done.returncode, done.stderr) == (0, "")
    (mine,) = (clone / "build").iterdir()
    assert re.fullmatch(r"mine-\d{4}-\d\d-\d\d-\d\d\.\d\d\.\d\d", mine.name) and mine.name in done.stdout
    saved = {str(path.relative_to(mine)): path.read_text() for path in mine.rglob("*") if path.is_file()}
    assert saved == edits
    assert all(name in done.stdout for name in edits)
    assert git(clone, "status", "--porcelain") == " M other.py\n"
    assert (clone / "scripts" / "b.py").read_text() == "scripts/b.py as committed"
    assert (clone / "scripts" / "x.log").exists()


def test_reset_without_edits_does_nothing(clone):
    done = reset(clone)
    assert (done.returncode, done.stdout) == (0, "reset: nothing to do, scripts/ and notebooks/ are as committed\n")
    assert not (clone / "build").exists()


@pytest.mark.parametrize("outside", [True, False], ids=["inside another clone", "no clone"])
def test_reset_needs_a_clone(tmp_path, clone, outside):
    shutil.rmtree(clone / ".git")
    if outside:
        git(tmp_path, "init", "--quiet")
        copy = tmp_path / "copy"
        shutil.copytree(clone / "tools", copy / "tools")
        clone = copy
    (clone / "scripts").mkdir(exist_ok=True)
    (clone / "scripts" / "a.py").write_text("edited")
    done = reset(clone)
    assert (done.returncode, done.stdout) == (2, "")
    assert "works only in a git clone" in done.stderr and done.stderr.count("\n") == 1
    assert (clone / "scripts" / "a.py").read_text() == "edited"


# --------------------------------------------------------------------------------------------------------------- setup

FAKE_PYTHON = """#!/bin/sh
case "$*" in
    --version) echo Python 3.12.0 ;;
    -c*) exec {python} "$@" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>{log} ;;
    "-m pip "*) shift 3; echo "pip $*" >>{log}; [ ! -e {log}.broken ] ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def machine(project):
    """A project on a machine whose Python only notes what it is asked for."""
    (project / "pyproject.toml").write_text("[project]\n")
    shutil.copy(ROOT / "Makefile", project)
    fake = project / "fake-python"
    fake.write_text(FAKE_PYTHON.format(python=sys.executable, log=project / "log"))
    fake.chmod(0o755)
    return project


def setup(machine, *settings, python="./fake-python"):
    """`make setup` with these settings: its exit status, what it asked of Python, and what it said to stderr."""
    (machine / "log").write_text("")
    for name in ("VENV", "TORCH_INDEX", "PYTHON", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(name, None)
    done = call(machine, "make", "--silent", "setup", *([f"PYTHON={python}"] if python else []), *settings)
    return done.returncode, (machine / "log").read_text().splitlines(), done.stderr


INSTALL = "pip install -e .[dev]"


def test_setup_happens_once(machine):
    assert setup(machine) == (0, ["venv", INSTALL], "")
    assert setup(machine) == (0, [], "")
    assert setup(machine, python=None) == (0, [], "")
    (machine / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert setup(machine) == (0, [INSTALL], "")
    assert setup(machine) == (0, [], "")


def test_setup_takes_pytorch_from_another_index(machine):
    from_index = "pip install torch torchvision --index-url "
    assert setup(machine, "TORCH_INDEX=file:///cpu") == (0, ["venv", f"{from_index}file:///cpu", INSTALL], "")
    assert setup(machine) == (0, [], "")
    assert setup(machine, "TORCH_INDEX=file:///gpu") == (0, ["venv", f"{from_index}file:///gpu", INSTALL], "")


@pytest.mark.parametrize("interrupted", ["before venv", "in pip"])
def test_a_half_made_environment_is_made_again(machine, interrupted):
    if interrupted == "in pip":
        (machine / "log.broken").touch()
        status, asked, said = setup(machine)
        assert (status, asked) == (2, ["venv", INSTALL]) and "pip failed" in said
        (machine / "log.broken").unlink()
    else:
        (machine / ".venv" / "bin").mkdir(parents=True)
        (machine / ".venv" / ".ddp-tutorial-ours").touch()
    (machine / ".venv" / "half").touch()
    assert setup(machine) == (0, ["venv", INSTALL], "")
    assert not (machine / ".venv" / "half").exists()


def test_an_environment_of_your_own_is_never_deleted(machine):
    (machine / "own" / "bin").mkdir(parents=True)
    shutil.copy(machine / "fake-python", machine / "own" / "bin" / "python")
    (machine / "own" / "mine").touch()
    assert setup(machine, "VENV=own") == (0, [INSTALL], "")
    assert setup(machine, "VENV=own") == (0, [], "")
    assert setup(machine, "VENV=own", "TORCH_INDEX=file:///cpu")[1][-1] == INSTALL
    assert (machine / "own" / "mine").exists() and not (machine / ".venv").exists()
    (machine / "no-python").mkdir()
    status, asked, said = setup(machine, "VENV=no-python")
    assert (status, asked) == (2, []) and said.startswith("setup: no-python exists but holds no Python")


def test_an_environment_of_another_clone_is_only_added_to(machine, tmp_path_factory):
    other = tmp_path_factory.mktemp("clones") / "other"
    assert setup(machine) == (0, ["venv", INSTALL], "")
    shutil.copytree(machine, other, ignore=shutil.ignore_patterns(".venv"))
    (machine / ".venv" / "installed").touch()
    (machine / "log").unlink()
    assert setup(other, f"VENV={machine / '.venv'}", python=None)[0] == 0
    assert (machine / "log").read_text() == f"{INSTALL}\n"  # this Python's notes are where it was made
    assert (machine / ".venv" / "installed").exists()


def test_an_environment_that_was_moved_with_its_folder_is_made_again(machine, tmp_path_factory):
    moved = tmp_path_factory.mktemp("clones") / "moved"
    assert setup(machine)[0] == 0
    shutil.copytree(machine, moved)
    (moved / ".venv" / "installed").touch()
    assert setup(moved)[0] == 0
    assert not (moved / ".venv" / "installed").exists()


def test_an_unfit_python_is_one_line(machine):
    status, asked, said = setup(machine, python="/bin/false")
    assert (status, asked) == (2, [])
    assert said.splitlines()[0] == "setup: /bin/false is no Python 3.10 to 3.13: name one with PYTHON=/path/to/python"
    assert not (machine / ".venv").exists()
