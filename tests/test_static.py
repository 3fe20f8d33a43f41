"""What can be said about the notebooks without running them.

Each check takes the project's folder and a notebook, and returns its problems, one line each. The second half of this
file breaks a small series in every way that a check must notice.
"""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

from ddp_tutorial.parts import PartError, assemble_scripts, count_changed_lines, previous_step, sections, split_cell
from tools.series import find_notebooks, headline, output_problems, stream, title

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = find_notebooks(ROOT / "notebooks")

# How many lines a script may differ from the previous step's (a changed line counts twice): a step is one idea.
LARGEST_DIFF = {
    "01_single_device": 130,  # the first that trains
    "02_ddp_spawn": 205,
    "03_torchrun": 180,
    "04_mixed_precision": 75,
    "06_ddp_by_hand": 470,  # DDP written out; 05 starts anew
    "07_evaluation_and_batchnorm": 185,  # against 04; half of it is batch norm by hand
    "08_checkpoint_and_elastic": 530,  # snapshots, signals, other numbers of ranks
    "09_many_machines": 245,  # other launchers, a heartbeat, machines without a disk in common
}
LARGEST_SHARE_IGNORED = 0.40  # of the code cells with output, those whose output nbval does not compare
MOST_LAUNCHES = 6
WIDEST_LINE = 100


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code" and cell.source.strip()]


def solution_of(path):
    return path.parent / "solutions" / path.name


def with_solution(path):
    return [each for each in (path, solution_of(path)) if each.exists()]


def named(problems, path):
    return [f"{path.parent.name}/{path.name}: {problem}" for problem in problems]


# ------------------------------------------------------------------------------------------------------ one notebook


def check_script(root, path):
    """The cells assembled are the script, byte for byte, and so are the sections taken from the previous step."""
    own = Path("scripts") / f"{path.stem}.py"
    try:
        made = assemble_scripts(path, root)
    except PartError as error:
        return [str(error)]
    scripts = {name: text for name, text in made.items() if name.parts[0] == "scripts"}
    if own not in scripts or not sections(scripts[own]):
        return [f"no cell writes a section of {own}"]
    problems = []
    for name, text in scripts.items():
        if not (root / name).exists():
            problems.append(f"{name} does not exist")
        elif (root / name).read_bytes() != text.encode():
            there = (root / name).read_text(encoding="utf-8")
            differing = [s for s, body in sections(text).items() if sections(there).get(s) != body]
            problems.append(f"{name} is not what the cells write: {differing or 'text between sections'}")
    return problems


def check_diff(root, path):
    """A step changes no more than its bound."""
    own = Path("scripts") / f"{path.stem}.py"
    base = previous_step(own, root)
    if base is None:
        return []
    if path.stem not in LARGEST_DIFF:
        return [f"{own} has no bound in LARGEST_DIFF"]
    changed = count_changed_lines(base.read_text(encoding="utf-8"), (root / own).read_text(encoding="utf-8"))
    if not 0 < changed <= LARGEST_DIFF[path.stem]:
        return [f"{own} differs from {base.name} in {changed} lines, not in 1 to {LARGEST_DIFF[path.stem]}"]
    return []


def check_outputs(root, path):
    """Outputs are there, in order, without errors, warnings or traces of the machine that made them."""
    problems = []
    for each in with_solution(path):
        cells = code_cells(each)
        counts = [cell.execution_count for cell in cells]
        if counts != list(range(1, len(cells) + 1)):
            problems += named([f"execution counts are {counts}, not 1 to {len(cells)}"], each)
        silent = [count for cell, count in zip(cells, counts) if prints(cell.source) and not cell.outputs]
        if silent or not any(cell.outputs for cell in cells):
            problems += named([f"cells {silent} print, but their outputs are missing"], each)
        problems += named(output_problems(read(each)), each)
    return problems


def prints(source):
    """Whether a cell surely prints: our magics, or a call of print or check outside a function."""
    if re.match(r"\s*%%?(part|launch)\b", source):
        return True
    code = re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE)
    calls = [node.value for node in ast.parse(code).body if isinstance(node, ast.Expr)]
    return any(isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("print", "check") for call in calls)


def check_cells(root, path):
    """Cells keep their names from save to save, fit on a page, and launch no more than a reader will wait for."""
    problems = []
    for each in with_solution(path):
        notebook = json.loads(each.read_text(encoding="utf-8"))
        ids = [cell.get("id") for cell in notebook["cells"]]
        if None in ids or len(set(ids)) < len(ids):
            problems += named(["cells without an id, or with the same one"], each)
        if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
            problems += named(["its kernel is not python3"], each)
        cells = code_cells(each)
        # A command to launch is one line, however long.
        wide = [line for cell in cells for line in code_lines(cell.source) if len(line) > WIDEST_LINE]
        problems += named([f"wider than {WIDEST_LINE} columns: {line}" for line in wide], each)
        launches = sum(bool(re.search(r"^%%?launch\b", cell.source, re.MULTILINE)) for cell in cells)
        if launches > MOST_LAUNCHES:
            problems += named([f"launches {launches} times, more than {MOST_LAUNCHES}"], each)
    return problems


def code_lines(source):
    return [] if re.match(r"\s*%%launch\b", source) else re.sub(r"^%launch.*$", "", source, flags=re.M).splitlines()


def check_lesson(root, path):
    """The parts that a reader finds in every notebook."""
    cells = read(path).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown").lower()
    first = cells[0].source.lower()
    wanted = {
        "the first cell is a title": cells[0].cell_type == "markdown" and first.startswith("# "),
        "the first cell says what you will learn": "you will learn" in first,
        "the first cell says what it needs": "need" in first,
        "the first cell says how long it takes": re.search(r"\d+ (s|seconds|minutes?|min)\b", first),
        "the first cell names its script": f"scripts/{path.stem}.py" in first,
        "a question to predict": re.search(r"\bpredict", text),
        "a heading Recap": re.search(r"^#+ recap", text, re.MULTILINE),
        "a heading on exercises": re.search(r"^#+ exercise", text, re.MULTILINE),
        "%load_ext ddp_tutorial": any(cell.source.startswith("%load_ext ddp_tutorial") for cell in cells),
        "a line `headline: ...`": headline(read(path)),
        "a title": len(title(read(path))) > 0,
    }
    return [f"missing: {what}" for what, there in wanted.items() if not there]


def exercises(path, folder):
    """The exercises that a notebook checks: {name: what the check printed}, of those with a cell that writes them."""
    written = {split_cell(cell.source)[0].split()[0] for cell in code_cells(path) if split_cell(cell.source)}
    checked = {}
    for cell in code_cells(path):
        for name in re.findall(rf'check\("({folder}/\w+\.py)"\)', cell.source):
            if name in written:
                checked[Path(name).name] = stream(cell, "stdout")
    return checked


def check_exercises(root, path):
    """At least two, whose stubs do not pass and whose solutions do."""
    stubs = exercises(path, "build/exercises")
    if len(stubs) < 2:
        return [f"{len(stubs)} exercises have a stub and a check, not two or more"]
    problems = [f"{name}: the stub passes its check" for name, said in stubs.items() if "not yet" not in said]
    if not solution_of(path).exists():
        return [*problems, "no notebook in solutions/"]
    solved = exercises(solution_of(path), "build/exercises/solutions")
    if solved.keys() != stubs.keys():
        problems.append(f"exercises {sorted(stubs)}, but solutions {sorted(solved)}")
    return problems + [f"{name}: the solution does not pass" for name, said in solved.items() if "passed" not in said]


CHECKS = [check_script, check_diff, check_outputs, check_cells, check_lesson, check_exercises]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, check):
    assert check(ROOT, path) == []


# ---------------------------------------------------------------------------------------------------- the whole series


def series_problems(root):
    """Notebooks, scripts and solutions belong together, one to one."""
    folders = {"notebooks": "ipynb", "notebooks/solutions": "ipynb", "scripts": "py"}
    stems = {folder: {path.stem for path in (root / folder).glob(f"*.{end}")} for folder, end in folders.items()}
    return [
        f"{folder} has {sorted(found ^ stems['notebooks'])} more or less than notebooks"
        for folder, found in stems.items()
        if found != stems["notebooks"]
    ]


def ignored(paths):
    """Of the code cells with output, how many nbval does not compare, for each notebook: {name: (ignored, all)}."""
    shares = {}
    for each in (each for path in paths for each in with_solution(path)):
        tags = [set(cell.metadata.get("tags", [])) for cell in code_cells(each) if cell.outputs]
        shares[f"{each.parent.name}/{each.name}"] = sum("nbval-ignore-output" in tag for tag in tags), len(tags)
    return shares


def test_series_is_complete():
    assert len(NOTEBOOKS) >= 5
    assert series_problems(ROOT) == []


SHOWN = [  # (notebook, cell, text of its output): what a lesson is about, and must not be lost when outputs are remade
    ("02_ddp_spawn", "launch-unequal", "machine 0 has --nproc 1, but machine 1 --nproc 2"),
    ("02_ddp_spawn", "launch-failure", "ZeroDivisionError: division by zero"),
    ("03_torchrun", "launch-killed", "killed after epoch 1, on purpose"),
    ("03_torchrun", "launch-failure-recorded", "RuntimeError: the disk is full"),
    ("07_evaluation_and_batchnorm", "launch-gradients", "3 and 2, global_mean: the gradient is off by less than 1e"),
    ("07_evaluation_and_batchnorm", "launch-alone", "[rank 1] through the wrapper: failed, no answer"),
    ("09_many_machines", "launch-wrong-name", "nodex does not resolve to an address"),
    ("09_many_machines", "launch-cut", "[rank 0] lost rank 1 on node1: not heard of for 5 s"),
]


@pytest.mark.parametrize(("stem", "cell_id", "text"), SHOWN, ids=lambda value: value[:30])
def test_lessons_show_what_they_are_about(stem, cell_id, text):
    (cell,) = (cell for cell in read(ROOT / "notebooks" / f"{stem}.ipynb").cells if cell.id == cell_id)
    assert text in stream(cell, "stdout")


def test_most_outputs_are_compared():
    shares = ignored(NOTEBOOKS)
    skipped, total = (sum(column) for column in zip(*shares.values()))
    assert total >= 50
    assert skipped / total <= LARGEST_SHARE_IGNORED, shares


def test_no_cell_escapes_nbval():
    """Only one tag is allowed, and no comment that nbval obeys (it would land in a script)."""
    cells = [cell for path in NOTEBOOKS for each in with_solution(path) for cell in code_cells(each)]
    assert len(cells) >= 50
    assert {tag for cell in cells for tag in cell.metadata.get("tags", [])} <= {"nbval-ignore-output"}
    assert not [cell.source for cell in cells if "NBVAL_" in cell.source]


# ------------------------------------------------------------------------------------------------ the checks can fail

SCRIPTS = {"00_hello": '# %% About\n"""Greet."""\n\n\n# %% Main\nprint("hello")\n'}
SCRIPTS["01_bye"] = SCRIPTS["00_hello"].replace("hello", "bye")
FIRST_CELL = "# Hello\nYou will learn to greet. Needs nothing. 20 s. Writes scripts/{}.py"


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def code(source, output="", *tags):
    outputs = [nbformat.v4.new_output("stream", text=output)] if output else []
    return nbformat.v4.new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


def practice(folder, said):
    """Two exercises: the cells that write and check them."""
    for name in ("a", "b"):
        yield code(f"%%part {folder}/{name}.py Answer\nx = 1", "written")
        yield code(f'check("{folder}/{name}.py")', said)


def save(path, cells):
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    cells[0].id, cells[1].id = "first", "second"
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": ""}})
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


@pytest.fixture
def series(tmp_path, monkeypatch):
    """A faultless series of two steps; its second notebook is the one to break."""
    (tmp_path / "scripts").mkdir()
    for number, (stem, script) in enumerate(SCRIPTS.items()):
        (tmp_path / "scripts" / f"{stem}.py").write_text(script)
        body = sections(script)
        new_about = code(f"%%part scripts/{stem}.py About\n{body['About']}", "written")
        after = "" if number else " --after About"  # the first script has nothing to start from
        new_main = code(f"%%part scripts/{stem}.py Main{after}\n{body['Main']}", "written")
        cells = [
            text(FIRST_CELL.format(stem)),
            code("%load_ext ddp_tutorial"),
            *([new_main] if number else [new_about, new_main]),  # the second takes About from the first
            code(f"%launch python scripts/{stem}.py", "hello", "nbval-ignore-output"),
            text("Predict, then run."),
            code("print('headline: 2')", "headline: 2"),
            text("## Exercises"),
            *practice("build/exercises", "not yet: x"),
            text("## Recap"),
        ]
        save(tmp_path / "notebooks" / f"{stem}.ipynb", cells)
        solved = list(practice("build/exercises/solutions", "passed: 3 cases"))
        save(tmp_path / "notebooks" / "solutions" / f"{stem}.ipynb", solved)
    monkeypatch.setitem(LARGEST_DIFF, "01_bye", 2)
    return tmp_path


def test_a_faultless_series_has_no_problems(series):
    notebooks = find_notebooks(series / "notebooks")
    assert [path.stem for path in notebooks] == ["00_hello", "01_bye"]
    assert [check(series, path) for check in CHECKS for path in notebooks] == [[]] * 12
    assert series_problems(series) == []
    assert ignored(notebooks)["notebooks/01_bye.ipynb"] == (1, 7)


def edit(old, new, solution=False):
    """Replace text in the second notebook's file; it must be there."""

    def break_it(series):
        path = series / "notebooks" / ("solutions" if solution else "") / "01_bye.ipynb"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return break_it


def edit_cells(change, solution=False):
    def break_it(series):
        path = series / "notebooks" / ("solutions" if solution else "") / "01_bye.ipynb"
        notebook = read(path)
        change(notebook.cells)
        nbformat.write(notebook, path)

    return break_it


def edit_script(series):
    path = series / "scripts" / "01_bye.py"
    path.write_text(path.read_text() + "\n")


def edit_base(series):
    path = series / "scripts" / "00_hello.py"
    path.write_text(path.read_text().replace("Greet", "Shout"))


def output_of(kind, **content):
    return edit_cells(lambda cells: cells[2].outputs.append(nbformat.v4.new_output(kind, **content)))


def forget_outputs(cells):
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = []


FAULTS = [
    (check_script, edit_script, "is not what the cells write: text between sections"),
    (check_script, edit_base, "is not what the cells write: ['About']"),
    (check_script, edit('print(\\"bye\\")', 'print(\\"see you\\")'), "is not what the cells write: ['Main']"),
    (check_script, edit("%%part scripts/01_bye.py Main", "%%part scripts/01_bye.py Mian"), 'no section "Mian"'),
    (check_script, edit("%%part scripts/", "%%part build/"), "no cell writes a section of"),
    (check_script, lambda series: (series / "scripts" / "01_bye.py").unlink(), "does not exist"),
    (check_diff, lambda series: LARGEST_DIFF.pop("01_bye"), "has no bound"),
    (check_outputs, edit('"execution_count": 2', '"execution_count": 3'), "execution counts are [1, 3"),
    (check_outputs, edit('"execution_count": 2', '"execution_count": null'), "execution counts are [1, None"),
    (check_outputs, edit_cells(lambda cells: cells[3].outputs.clear()), "cells [3] print"),
    (check_outputs, edit_cells(lambda cells: cells[1].outputs.clear(), solution=True), "cells [2] print"),
    (check_outputs, edit_cells(forget_outputs), "cells [2, 3, 4, 5, 6, 7, 8] print"),
    (check_outputs, output_of("stream", name="stderr", text="Warning: old"), "wrote to stderr: Warning: old"),
    (check_outputs, output_of("error", ename="ValueError", evalue="x", traceback=[]), "ended with ValueError: x"),
    (check_outputs, output_of("stream", text="see /home/me/x"), "shows the machine (/home/)"),
    (check_outputs, output_of("display_data", data={"text/plain": "<A object at 0x7f>"}), "shows the machine (object"),
    (check_outputs, output_of("display_data", data={"text/html": "/root/x.py"}), "shows the machine (/root/)"),
    (check_outputs, output_of("display_data", data={"image/png": "A" * 300_000}), "a picture of more than"),
    (check_cells, edit('"id": "second"', '"id": "first"'), "the same one"),
    (check_cells, edit('"id": "second",', ""), "without an id"),
    (check_cells, edit('"name": "python3"', '"name": "other"'), "kernel is not python3"),
    (check_cells, edit('print(\\"bye\\")', f'print(\\"{95 * "e"}\\")'), "wider than 100 columns"),
    (check_cells, edit_cells(lambda cells: cells.extend(code("%launch a") for _ in range(6))), "launches 7 times"),
    (check_lesson, edit("You will learn", "This is"), "what you will learn"),
    (check_lesson, edit("20 s", "some time"), "how long it takes"),
    (check_lesson, edit("Writes scripts", "Writes"), "names its script"),
    (check_lesson, edit("Needs nothing", "It is easy"), "what it needs"),
    (check_lesson, edit("Predict", "Then"), "a question to predict"),
    (check_lesson, edit("# Recap", "# End"), "Recap"),
    (check_lesson, edit("# Exercises", "# Homework"), "exercises"),
    (check_lesson, edit("%load_ext ddp_tutorial", "%load_ext other"), "%load_ext"),
    (check_lesson, edit('"headline: 2"', '"two"'), "a line `headline"),
    (check_exercises, edit('check(\\"build/exercises/b', 'check(\\"build/exercises/c'), "1 exercises have a stub"),
    (check_exercises, edit('"not yet: x"', '"passed: 3 cases"'), "b.py: the stub passes"),
    (check_exercises, edit('"passed: 3 cases"', '"not yet: x"', solution=True), "a.py: the solution does not pass"),
    (check_exercises, edit("solutions/b", "solutions/c", solution=True), "but solutions ['a.py', 'c.py']"),
    (check_exercises, lambda series: solution_of(series / "notebooks" / "01_bye.ipynb").unlink(), "no notebook in"),
]


@pytest.mark.filterwarnings("ignore:Cell is missing an id|Non-unique cell id")
@pytest.mark.parametrize("check, break_it, said", FAULTS, ids=[said for _, _, said in FAULTS])
def test_a_fault_is_noticed(series, check, break_it, said):
    break_it(series)
    problems = check(series, series / "notebooks" / "01_bye.ipynb")
    assert said in "\n".join(problems)


def test_a_large_diff_is_noticed(series, monkeypatch):
    monkeypatch.setitem(LARGEST_DIFF, "01_bye", 1)
    assert "differs from 00_hello.py in 2 lines" in check_diff(series, series / "notebooks" / "01_bye.ipynb")[0]


@pytest.mark.parametrize("name", ["scripts/01_bye.py", "notebooks/solutions/01_bye.ipynb", "notebooks/01_bye.ipynb"])
def test_a_missing_file_is_noticed(series, name):
    (series / name).unlink()
    assert "['01_bye']" in series_problems(series)[0]
