"""Sections of scripts, the `%%part` magic, and the diff between steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from ddp_tutorial import parts
from ddp_tutorial.parts import PartError

FIRST = '# %% About\n"""One."""\n\n\n# %% Data\nx = 1\n\n\n# %% Main\nprint(x)\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty copy of the series' folders with one step, the current folder being its notebooks."""
    for folder in ("ddp_tutorial", "scripts", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "scripts/01_one.py").write_text(FIRST)
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


@pytest.fixture
def shell(project):
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.run_line_magic("load_ext", "ddp_tutorial")
    return shell


def run(shell, source):
    """Returns (standard output, standard error, the exception or None)."""
    with capture_output() as captured:
        result = shell.run_cell(source)
    return captured.stdout, captured.stderr, result.error_before_exec or result.error_in_exec


def refused(shell, source, file):
    """Run a cell that must be refused with `file` untouched; returns the one line."""
    before = (file.read_bytes(), file.stat().st_mtime_ns) if file.exists() else None
    out, err, error = run(shell, source)
    assert isinstance(error, PartError), error
    assert out.startswith("%%part: refused, no file was changed\n")
    assert "UsageError" not in out + err
    assert "\n" not in str(error)
    assert out.strip().endswith(f"PartError: {error}")  # the line, and no stack
    assert len(out.strip().splitlines()) == 2
    assert before == ((file.read_bytes(), file.stat().st_mtime_ns) if file.exists() else None)
    assert [each.name for each in file.parent.glob(".*")] == []  # no temporary file stays
    return str(error)


# -------------------------------------------------------------------------------------------------------- pure text


def test_every_byte_belongs_to_a_section():
    text = "#!/usr/bin/env python\n\n# %% A\nx = 1\n# %%\n\n# %%  B b \n\n\ny = 2"
    chunks = parts.split(text)
    assert [name for name, _ in chunks] == [None, "A", " B b"]
    assert "".join(chunk for _, chunk in chunks) == text
    assert parts.split("") == []
    assert parts.split("x = 1\n") == [(None, "x = 1\n")]


def test_sections_are_what_cells_would_hold():
    assert parts.sections(FIRST) == {"About": '"""One."""', "Data": "x = 1", "Main": "print(x)"}
    assert parts.sections("# %% A\n\n\n    x = 1  \r\n\r\n# %% B\n") == {"A": "    x = 1", "B": ""}
    with pytest.raises(PartError, match='two sections are named "A"'):
        parts.sections("# %% A\n\n# %% A\n")


def test_replacing_keeps_every_other_byte():
    text = "# a comment\n\n# %% A\nx = 1\n\n# %% B\ny = 2\n\n\n\n# %% C\nz = 3\n"
    assert parts.replace(text, "B", "y = 5") == text.replace("y = 2\n\n\n\n", "y = 5\n\n\n")
    assert parts.replace(text, "C", "\n  \nz = 5\n\n") == text.replace("z = 3", "z = 5")
    assert parts.replace(text, "A", "x = 5") == text.replace("x = 1\n\n", "x = 5\n\n\n")


def test_inserting_goes_behind_the_named_section_and_into_place_the_second_time():
    middle = parts.replace(FIRST, "Model", "m = 1", after="Data")
    assert middle == FIRST.replace("x = 1\n", "x = 1\n\n\n# %% Model\nm = 1\n")
    assert parts.replace(middle, "Model", "m = 1", after="About") == middle
    end = parts.replace(FIRST, "End", "e = 1", after="Main")
    assert end == FIRST + "\n\n# %% End\ne = 1\n"
    assert parts.replace(end, "Main", "print(x)") == end


@pytest.mark.parametrize("old, new, count", [
    ("a\nb\nc\n", "a\nb\nc\n", 0),
    ("a\nb\nc\n", "a\nB\nc\n", 2),
    ("a\nb\n", "a\nx\ny\nb\n", 2),
    ("", "a\nb\n", 2),
])
def test_changed_lines_are_counted(old, new, count):
    assert parts.count_changed_lines(old, new) == count


# -------------------------------------------------------------------------------------------------------- the magic


def test_a_cell_replaces_its_section_in_place(shell, project):
    script = project / "scripts/01_one.py"
    for _ in range(2):  # the line is the same when the cell runs again
        out, err, error = run(shell, "%%part scripts/01_one.py Data\n\nx = 2\ny = 3\n\n")
        assert (out, err, error) == ("scripts/01_one.py: Data, 2 lines\n", "", None)
        assert script.read_text() == FIRST.replace("x = 1", "x = 2\ny = 3")


def test_cells_can_run_in_any_order(shell, project):
    cells = ["Data\nx = 7", "Main\nprint(x, x)", 'About\n"""Uno."""']
    texts = set()
    for order in (cells, cells[::-1]):
        for cell in order:
            assert run(shell, f"%%part scripts/01_one.py {cell}")[2] is None
        texts.add((project / "scripts/01_one.py").read_bytes())
    assert texts == {b'# %% About\n"""Uno."""\n\n\n# %% Data\nx = 7\n\n\n# %% Main\nprint(x, x)\n'}


def test_a_missing_script_starts_as_a_copy_of_the_previous_step(shell, project):
    (project / "scripts/00_zero.py").write_text("# %% Zero\nz = 0\n")
    (project / "scripts/09_nine.py").write_text("# %% Nine\nn = 9\n")
    (project / "scripts/notes.py").write_text("# %% Notes\nn = 9\n")
    out, _, error = run(shell, "%%part scripts/02_two.py Data\nx = 2")
    assert (out, error) == ("scripts/02_two.py: Data, 1 line\n", None)
    assert (project / "scripts/02_two.py").read_text() == FIRST.replace("x = 1", "x = 2")
    assert parts.previous_step("scripts/09_nine.py") == project / "scripts/02_two.py"
    assert parts.previous_step("scripts/01_other.py") == project / "scripts/00_zero.py"
    assert parts.previous_step("scripts/00_zero.py") is None
    assert parts.previous_step("build/exercises/02_x.py") is None
    other = project / "scripts/01_other.py"
    assert "its sections are: Zero" in refused(shell, "%%part scripts/01_other.py Data\nx = 1", other)


def test_an_unknown_name_is_refused_with_the_list_unless_after(shell, project):
    script = project / "scripts/01_one.py"
    line = refused(shell, "%%part scripts/01_one.py Datta\nx = 2", script)
    assert line == 'no section "Datta"; its sections are: About, Data, Main; to add it: --after NAME'
    line = refused(shell, "%%part scripts/01_one.py Model --after Datta\nx = 2", script)
    assert line == 'no section "Datta" to come after; its sections are: About, Data, Main'
    for body in ("m = 1", "m = 2"):  # the second time in place
        out, _, error = run(shell, f"%%part scripts/01_one.py The model-to be --after   Data\n{body}")
        assert (out, error) == ("scripts/01_one.py: The model-to be, 1 line\n", None)
        assert script.read_text() == FIRST.replace("x = 1\n", f"x = 1\n\n\n# %% The model-to be\n{body}\n")


def test_files_that_are_no_steps_start_empty(shell, project):
    exercise = project / "build/exercises/02_shards.py"
    out, _, error = run(shell, "%%part build/exercises/02_shards.py Shards\n...")
    assert (out, error) == ("build/exercises/02_shards.py: Shards, 1 line\n", None)
    assert exercise.read_text() == "# %% Shards\n...\n"
    assert "its sections are: Shards" in refused(shell, "%%part build/exercises/02_shards.py Other\n...", exercise)
    exercise.write_text("import os")  # no sections yet: kept as it is
    run(shell, "%%part build/exercises/02_shards.py Shards\n...")
    assert exercise.read_text() == "import os\n\n\n# %% Shards\n...\n"


@pytest.mark.parametrize("name", ["Data!", "Da_ta", "--force Data", "Data --afte Main", "{x}", "$HOME", "Dáta/x"])
def test_names_are_letters_digits_spaces_hyphens(shell, project, name):
    shell.user_ns["x"] = "Data"
    line = refused(shell, f"%%part scripts/01_one.py {name}\nx = 2", project / "scripts/01_one.py")
    assert f'"{name}" is no name' in line  # and nothing in it was expanded


def test_nothing_in_the_path_is_expanded(shell, project):
    shell.user_ns["x"] = "01_one"
    run(shell, "%%part build/{x}$HOME.py Data\nx = 2")
    assert (project / "build/{x}$HOME.py").read_text() == "# %% Data\nx = 2\n"


@pytest.mark.parametrize("line", ["", " scripts/01_one.py", " scripts/01_one.py --after Data",
                                  " scripts/01_one.py Data --after", " --after Data scripts/01_one.py"])
def test_a_line_that_lacks_something_says_what_it_should_be(shell, project, line):
    said = refused(shell, f"%%part{line}\nx = 2", project / "scripts/01_one.py")
    assert said.startswith("the line reads %%part PATH NAME")


@pytest.mark.parametrize("body, reason", [
    ("x = 2\n# %% Main\ny = 3", 'a section cannot hold a marker of its own: "# %% Main"'),
    ("#%%\ny = 3", 'a section cannot hold a marker of its own: "#%%"'),
    ("x = 2\ny = (", "'(' was never closed, line 2 of \"Data\": y = ("),
    ("if x:", 'line 1 of "Main": print(x)'),  # where Python sees it
    ("return 3", "'return' outside function, line 1 of \"Data\": return 3"),
    ("x = '\0'", "null"),
    ("", 'the cell is empty: write the section "Data" below its first line'),
    ("\n  \n\n", 'the cell is empty: write the section "Data" below its first line'),
])
def test_refused_with_the_file_untouched(shell, project, body, reason):
    assert reason in refused(shell, f"%%part scripts/01_one.py Data\n{body}", project / "scripts/01_one.py")


def test_an_empty_cell_is_no_usage_error_in_any_form(shell, project):
    script = project / "scripts/01_one.py"
    for cell in ("%%part scripts/01_one.py Data", "\n\n%%part scripts/01_one.py Data", "%part scripts/01_one.py Data"):
        assert "cell" in refused(shell, cell, script)


@pytest.mark.parametrize("path, reason", [
    ("../outside.py", "is outside the project"),
    ("/tmp/outside.py", "is outside the project"),
    ("scripts/link.py", "is outside the project"),
    ("scripts/01_one.txt", "must end in .py"),
    ("scripts", "must end in .py"),
])
def test_only_scripts_inside_the_project(shell, project, tmp_path_factory, path, reason):
    outside = tmp_path_factory.mktemp("outside") / "file.py"
    outside.write_text("x = 1\n")
    (project / "scripts/link.py").symlink_to(outside)
    assert reason in refused(shell, f"%%part {path} Data\nx = 2", outside)
    assert not (project.parent / "outside.py").exists()


def test_written_with_lf_and_utf8_whatever_was_there(shell, project):
    script = project / "scripts/01_one.py"
    script.write_bytes(b"\xef\xbb\xbf" + FIRST.replace("\n", "\r\n").encode())
    shell.run_cell_magic("part", "scripts/01_one.py Data", "x = 'grüße, 数字'\r\ny = 2\r\n")
    assert script.read_bytes() == FIRST.replace("x = 1", "x = 'grüße, 数字'\ny = 2").encode()
    script.write_bytes(b"# %% Data\nx = '\xff'\n")
    assert refused(shell, "%%part scripts/01_one.py Data\nx = 2", script) == "01_one.py is not UTF-8 text"


def test_written_by_rename_with_the_mode_kept(shell, project, monkeypatch):
    script = project / "scripts/01_one.py"
    script.chmod(0o754)
    inode = script.stat().st_ino
    with open(script) as reader:
        run(shell, "%%part scripts/01_one.py Data\nx = 2")
        assert reader.read() == FIRST  # whoever had it open still reads all of what it was
    assert script.stat().st_ino != inode
    assert script.stat().st_mode & 0o777 == 0o754

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert "No space left on device" in refused(shell, "%%part scripts/01_one.py Data\nx = 3", script)


def test_the_body_arrives_as_it_was_typed(shell, project):
    body = ">>> x\n... y"  # IPython would take these for prompts and strip them
    with pytest.raises(PartError, match="invalid syntax"):
        parts.write_part("scripts/01_one.py", "Data", body)
    assert "invalid syntax" in refused(shell, f"%%part scripts/01_one.py Data\n{body}", project / "scripts/01_one.py")
    run(shell, "%%part scripts/01_one.py Data\n...\nx = '%time $x {x} !ls?'")
    assert "# %% Data\n...\nx = '%time $x {x} !ls?'\n\n\n# %% Main" in (project / "scripts/01_one.py").read_text()


def test_loading_twice_is_loading_once(shell, project):
    before = len(shell.input_transformers_cleanup)
    shell.run_line_magic("load_ext", "ddp_tutorial")
    from ddp_tutorial import load_ipython_extension
    load_ipython_extension(shell)
    assert len(shell.input_transformers_cleanup) == before
    assert run(shell, "%%part scripts/01_one.py Data\nx = 2")[2] is None
    assert run(shell, "x = 1\nprint('%%part')")[0] == "%%part\n"  # other cells are left alone


def test_loading_imports_nothing_heavy():
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as S; import sys; s = S.instance();"
        "s.run_line_magic('load_ext', 'ddp_tutorial'); import ddp_tutorial.parts;"
        "print(sorted({'torch', 'torchvision', 'matplotlib', 'ddp_tutorial.magics'} & set(sys.modules)))"
    )
    root = Path(parts.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert out.stdout == "['ddp_tutorial.magics']\n", out.stderr


# ----------------------------------------------------------------------------------------- assembled without a kernel


def test_assembling_equals_running_the_cells(shell, project):
    cells = [
        "%load_ext ddp_tutorial",
        "%%part scripts/02_two.py Data\n\nx = 2\n",
        "\n%%part scripts/02_two.py Model --after Data\nm = 'ü'",
        "%%part build/exercises/02_x.py Shards\n...\n",
        "%%partial\nx",
        "%%part scripts/02_two.py Data\nx = 3  \n\n",
    ]
    notebook = project / "notebooks/02_two.ipynb"
    notebook.write_text(json.dumps({"cells": [
        {"cell_type": "markdown", "source": "%%part scripts/02_two.py Nothing\nx"},
        *({"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells),
    ]}))
    (project / "scripts/02_two.py").write_text("what is there already counts for nothing")
    made = parts.assemble_scripts(notebook)
    assert list(made) == [Path("scripts/02_two.py"), Path("build/exercises/02_x.py")]
    assert list(parts.sections(made[Path("scripts/02_two.py")])) == ["About", "Data", "Model", "Main"]

    (project / "scripts/02_two.py").unlink()
    for cell in cells:
        if "%%part " in cell:
            assert run(shell, cell)[2] is None
    for path, text in made.items():
        assert (project / path).read_bytes() == text.encode()


def test_assembling_names_the_cell_that_is_refused(project):
    notebook = project / "notebooks/02_two.ipynb"
    notebook.write_text(json.dumps({"cells": [
        {"cell_type": "code", "source": "x = 1"},
        {"cell_type": "code", "source": ["%%part scripts/02_two.py Datta\n", "x = 2"]},
    ]}))
    with pytest.raises(PartError, match='^02_two.ipynb, cell 2: no section "Datta"'):
        parts.assemble_scripts(notebook)


# -------------------------------------------------------------------------------------------------------- the diff


def test_the_diff_of_a_step_is_made_from_the_files(project, shell, monkeypatch):
    second = parts.replace(FIRST, "Data", "x = 1\ny = '<b>'")
    (project / "scripts/02_two.py").write_text(parts.replace(second, "Model", "m = 1", after="Data"))
    expected = "\n".join([
        "--- scripts/01_one.py", "+++ scripts/02_two.py", "Unchanged: About, Main",
        "# %% Data", " x = 1", "+y = '<b>'",
        "# %% Model (new)", "+m = 1",
    ])
    for step in ("02", "02_two.py", "scripts/02_two.py"):
        assert parts.step_diff(step) == expected
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    parts.show_diff("02")
    data, _ = shell.display_formatter.format(shown[0])
    assert data["text/plain"] == expected
    assert "+y = &#x27;&lt;b&gt;&#x27;</div>" in data["text/html"]
    assert data["text/html"].startswith('<pre style="font-family: var(--jp-code-font-family, monospace);')


def test_the_diff_shows_what_went_and_skips_what_is_far(project):
    long = "# %% A\n" + "".join(f"a{i} = {i}\n" for i in range(20))
    (project / "scripts/01_one.py").write_text(long + "\n\n# %% B\nb = 1\n")
    (project / "scripts/02_two.py").write_text(long.replace("a1 = 1\n", "").replace("a18 = 18", "a18 = 0"))
    assert parts.step_diff("02").split("\n") == [
        "--- scripts/01_one.py", "+++ scripts/02_two.py",
        "# %% A", " a0 = 0", "-a1 = 1", " a2 = 2", " a3 = 3", "  ...",
        " a16 = 16", " a17 = 17", "-a18 = 18", "+a18 = 0", " a19 = 19",
        "# %% B (gone)", "-b = 1",
    ]


@pytest.mark.parametrize("step, reason", [
    ("01", "starts anew"), ("07", 'no script of step "07"'), ("x", "no script"),
])
def test_a_diff_without_two_steps_says_so(project, step, reason):
    with pytest.raises(PartError, match=reason):
        parts.step_diff(step)
