"""Scripts made of named sections, each of them a notebook cell.

In a script a section begins with a line ``# %% Its name`` and ends where the next one begins. Text before the first
such line belongs to a section without a name. ``%%part PATH NAME [--after NAME]`` replaces one section in place.

A section is written as its ``# %%`` line, the cell's body without blank lines at either end, and one newline;
two blank lines part it from the next section. So what the cells say is what the file holds, byte for byte.
"""

import contextlib
import difflib
import html
import json
import os
import re
import tempfile
import warnings
from pathlib import Path

from ddp_tutorial.paths import project_root

MARKER = re.compile(r"^# %% (?P<name>.*\S)[ \t]*\n?", re.MULTILINE)
ANY_MARKER = re.compile(r"^[ \t]*#[ \t]*%%")
NAME = re.compile(r"(?!-)[^\W_](?:[^\W_]|[ -])*")
STEP = re.compile(r"(\d\d)_\w+\.py")
# A step builds on the one before it. These do not: 05 starts anew, 06 takes DDP out of 02, and 07 goes on with 04.
BUILDS_ON = {"05": None, "06": "02", "07": "04"}
USAGE = "%%part PATH NAME [--after NAME], and the section's text below that line"


class PartError(Exception):
    """A refused ``%%part``, or a script whose sections cannot be told apart; its text is the line to show."""

    def _render_traceback_(self):  # asked for by IPython: the line says it all, the stack is ours, not the reader's
        return [f"{type(self).__name__}: {self}"]


# ---------------------------------------------------------------------------------------------- sections of a text


def split(text):
    """Split `text` into ``[(name, chunk), ...]``, in order; the chunks joined are `text` again.

    A chunk holds its ``# %%`` line. What comes before the first such line has the name None.
    """
    starts = [(match.start(), match["name"]) for match in MARKER.finditer(text)]
    if not starts or starts[0][0] > 0:
        starts.insert(0, (0, None))
    ends = [start for start, _ in starts[1:]] + [len(text)]
    return [(name, text[start:end]) for (start, name), end in zip(starts, ends) if end > start]


def sections(text):
    """The named sections of `text` as ``{name: body}``, in order, bodies as a cell would hold them.

    Raises PartError when two sections have the same name.
    """
    found = {}
    for name, chunk in split(text):
        if name in found:
            raise PartError(f'two sections are named "{name}"; rename one of them')
        if name is not None:
            found[name] = _tidy(MARKER.sub("", chunk, count=1))
    return found


def replace(text, name, body, after=None, any_name=False):
    """`text` with the section `name` replaced by `body`, or inserted behind the section `after`.

    A name that `text` does not have is refused unless `after` is given; `any_name` appends it instead.
    Returns the new text, with LF line ends. Raises PartError, and then nothing has happened.
    """
    name, after = _clean_name(name), after and _clean_name(after)
    body = _tidy(body)
    if not body:
        raise PartError(f'the cell is empty: write the section "{name}" below its first line')
    for line in body.split("\n"):
        if ANY_MARKER.match(line):
            raise PartError(f'a section cannot hold a marker of its own: "{line.strip()}"; give it a cell of its own')
    chunks = split(_lf(text))
    names = list(sections(_lf(text)))
    if after is not None and after not in names:
        raise PartError(f'no section "{after}" to come after; {_listing(names)}')
    chunk = f"# %% {name}\n{body}\n"
    pieces = [piece for _, piece in chunks]
    if name in names:
        at = [known for known, _ in chunks].index(name)
        del pieces[at]
    elif after is not None or any_name:
        at = 1 + [known for known, _ in chunks].index(after) if after else len(chunks)
        if at > 0:
            pieces[at - 1] = pieces[at - 1].rstrip("\n") + "\n\n\n"
    else:
        raise PartError(f'no section "{name}"; {_listing(names)}; to add it: --after NAME')
    pieces.insert(at, chunk + "\n\n" if at < len(pieces) else chunk)
    return "".join(pieces)


def check_compiles(text, path, name):
    """Raise PartError, naming the line, when `text` is no Python program that could be saved as `path`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte, on Python before 3.12
        line = getattr(error, "lineno", None) or 1
        lines = text.split("\n")
        quoted = lines[min(line, len(lines)) - 1].strip()
        marker = max((i for i, other in enumerate(lines[:line], 1) if MARKER.match(other)), default=0)
        where = MARKER.match(lines[marker - 1])["name"] if marker else "the beginning"
        reason = getattr(error, "msg", None) or error
        raise PartError(f'with this section "{name}" the file would not compile: '
                        f'{reason}, line {line - marker} of "{where}": {quoted}') from None


def _lf(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _tidy(body):
    """`body` with LF line ends and without blank lines at either end."""
    return re.sub(r"\A(?:[ \t]*\n)+", "", _lf(body)).rstrip()


def _clean_name(name):
    name = " ".join(name.split())
    if not NAME.fullmatch(name) or " --" in name:
        raise PartError(f'"{name}" is no name for a section: letters, digits, spaces and hyphens only')
    return name


def _listing(names):
    return f"its sections are: {', '.join(names)}" if names else "it has no sections yet"


# ------------------------------------------------------------------------------------------------- files and steps


def previous_step(path, root=None):
    """The script that the step in `path` (``scripts/NN_topic.py``) builds on: see BUILDS_ON.

    Returns a path, or None for a step that starts anew and for files that are no steps. It looks at the files on disk.
    """
    folder = (root or project_root()) / "scripts"
    path = Path(path)
    step = STEP.fullmatch(path.name)
    if not step or (root or project_root()) / path.parent != folder:
        return None
    others = [other for other in folder.glob("[0-9][0-9]_*.py") if STEP.fullmatch(other.name)]
    if step[1] in BUILDS_ON:
        others = [other for other in others if other.name[:2] == BUILDS_ON[step[1]]]
    return max((other for other in others if other.name[:2] < step[1]), default=None)


def write_part(path, name, body, after=None):
    """Make `body` the section `name` of the script at `path` (relative to the project's root).

    Returns the line to show. Raises PartError, with the file as it was.
    """
    root = project_root().resolve()
    shown, target = _inside(path, root)
    text, any_name = _start(shown, root, target)
    new = replace(text, name, body, after, any_name)
    check_compiles(new, shown, " ".join(name.split()))
    _write(target, new)
    name = " ".join(name.split())
    lines = sections(new)[name].count("\n") + 1
    return f"{shown.as_posix()}: {name}, {lines} line{'' if lines == 1 else 's'}"


def _inside(path, root):
    """`path` relative to `root`, and the file it leads to; PartError when that is no script inside the project."""
    target = (root / path).resolve()
    if not target.is_relative_to(root):
        raise PartError(f"{path} is outside the project; paths start at its top folder: scripts/02_ddp_spawn.py")
    if target.suffix != ".py" or target.is_dir():
        raise PartError(f"{path} is no Python script; its name must end in .py")
    return target.relative_to(root), target


def _start(shown, root, target):
    """The text that a section goes into, and whether any name is welcome."""
    if target.exists():
        text = _read(target)
    else:
        base = previous_step(shown, root)
        text = _read(base) if base else ""
    return text, not sections(text)


def _read(path):
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _lf(file.read())
    except UnicodeDecodeError:
        raise PartError(f"{path.name} is not UTF-8 text") from None


def _write(path, text):
    """Write by rename, so that a reader of the file never sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise PartError(f"cannot write {path.name}: {error.strerror}") from None
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        raise PartError(f"cannot write {path.name}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ------------------------------------------------------------------------------------------------ cells and scripts


def parse_line(line):
    """``PATH NAME [--after NAME]`` as ``(path, name, after)``; PartError says what it should look like."""
    match = re.fullmatch(r"\s*(\S+)\s+(?!--after\b)(.+?)(?:\s+--after(?:\s+|=)(.+?))?\s*", line)
    if not match or match[1].startswith("-") or re.search(r"\s--after\s*$", line):
        raise PartError(f"the line reads {USAGE}")
    return match[1], match[2], match[3]


def split_cell(source):
    """A ``%%part`` cell's source as ``(line, body)``, or None for any other cell."""
    match = re.match(r"(?:[ \t]*\n)*%%part(?:[ \t]+(?P<line>[^\n]*))?(?:\n|\Z)", _lf(source))
    return match and ((match["line"] or "").strip(), _lf(source)[match.end():])


def assemble_scripts(notebook_path, root=None):
    """The scripts that a notebook's ``%%part`` cells make, run once each from top to bottom, without a kernel.

    A step's script starts as a copy of the previous step's file on disk, never of its own; any other starts empty.
    Returns ``{path relative to the root: text}``. Raises PartError, naming the cell.
    """
    root = Path(root or project_root()).resolve()
    cells = json.loads(Path(notebook_path).read_text(encoding="utf-8"))["cells"]
    made = {}
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or not split_cell(source):
            continue
        line, body = split_cell(source)
        try:
            path, name, after = parse_line(line)
            shown, _ = _inside(path, root)
            if shown not in made:
                base = previous_step(shown, root)
                made[shown] = _read(base) if base else ""
            new = replace(made[shown], name, body, after, any_name=not sections(made[shown]))
            check_compiles(new, shown, name)
        except PartError as error:
            raise PartError(f"{Path(notebook_path).name}, cell {number}: {error}") from None
        made[shown] = new
    return made


# ------------------------------------------------------------------------------------------- one step against the last


def count_changed_lines(old, new):
    """How many lines must go or come to turn the text `old` into `new`; a line that changed counts twice."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return sum(i2 - i1 + j2 - j1 for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def step_diff(step):
    """How the script of `step` ("02", or its path) differs from the previous step's, section by section, as text.

    Made from the files on disk. Raises PartError when there is no such step, or none before it.
    """
    return "\n".join(line for _, line in _diff_lines(step))


def show_diff(step):
    """Show `step_diff` in the notebook, with colours where they can be shown."""
    from IPython.display import display

    display(_Diff(_diff_lines(step)))


class _Diff:
    def __init__(self, lines):
        self.lines = lines

    def __repr__(self):
        return "\n".join(line for _, line in self.lines)

    def _repr_html_(self):
        # See-through colours: they work on light and dark pages, and blue and orange for colour-blind readers.
        styles = {"+": "background: rgba(0, 114, 178, 0.20)", "-": "background: rgba(230, 159, 0, 0.25)",
                  "#": "font-weight: bold; border-top: 1px solid rgba(128, 128, 128, 0.5); margin-top: 0.5em",
                  " ": "opacity: 0.75", "=": "font-weight: bold"}
        rows = "".join(f'<div style="{styles[kind]}">{html.escape(line) or "&nbsp;"}</div>'
                       for kind, line in self.lines)
        # Jupyter gives a <pre> in HTML output the text's own, proportional font.
        style = "font-family: var(--jp-code-font-family, monospace); line-height: 1.35; overflow-x: auto"
        return f'<pre style="{style}">{rows}</pre>'


def _diff_lines(step, context=2):
    """``[(kind, line), ...]``; kind is "+" added, "-" removed, " " as before, "#" a section's heading, "=" a note."""
    old_path, new_path = _steps(step)
    old, new = sections(_read(old_path)), sections(_read(new_path))
    lines = [("=", f"--- scripts/{old_path.name}"), ("=", f"+++ scripts/{new_path.name}")]
    same = [name for name in new if new[name] == old.get(name)]
    if same:
        lines.append(("=", f"Unchanged: {', '.join(same)}"))
    gone = [name for name in old if name not in new]
    for name in [name for name in new if name not in same] + gone:
        note = "" if name in old and name in new else " (new)" if name in new else " (gone)"
        lines.append(("#", f"# %% {name}{note}"))
        before, after = (text[name].split("\n") if name in text else [] for text in (old, new))
        changes = list(difflib.unified_diff(before, after, n=context, lineterm=""))[3:]
        lines += [(" ", "  ...") if line.startswith("@@") else (line[0], line) for line in changes]
    return lines


def _steps(step):
    root = project_root()
    number = re.match(r"(?:.*/)?(\d\d)(?:_\w+\.py)?$", str(step))
    found = sorted((root / "scripts").glob(f"{number[1]}_*.py")) if number else []
    if not found:
        raise PartError(f'no script of step "{step}" in scripts/; name a step as in show_diff("02")')
    old = previous_step(found[0].relative_to(root), root)
    if old is None:
        raise PartError(f"scripts/{found[0].name} starts anew: there is no step that it changes")
    return old, found[0]
