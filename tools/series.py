"""Run the notebooks from first to last, each in a fresh kernel.

    python tools/series.py run [NN]      executed notebooks, HTML and an index page under build/
    python tools/series.py outputs [NN]  in place, solutions too: the outputs that are committed
"""

import argparse
import asyncio
import getpass
import html
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbconvert import HTMLExporter

CELL_TIMEOUT = 300  # seconds; %launch gives up long before
SHOWN_LINES = 20  # of a failing cell and of its output
MACHINE_PATH = r"/(?:home|root|tmp|work|opt|mnt|var|Users|private)/|(?<!<)site-packages|\bobject at 0x"
LARGEST_PICTURE = 200_000  # characters of base64


class NotebookFailed(Exception):
    """A cell failed; the text says which, shows it, and ends with its error."""


class ThisPython(AsyncKernelManager):
    """Starts kernels with the Python that runs this program, whatever kernels the machine has registered."""

    @property
    def kernel_spec(self):
        return KernelSpec(**get_kernel_dict())


class Run:
    """One notebook executed in a fresh kernel. `notebook` has the outputs so far, also after a failure."""

    def __init__(self, path, folder):
        self.notebook = nbformat.read(path, as_version=4)
        self.cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        self.cell = None
        self.client = NotebookClient(
            self.notebook,
            resources={"metadata": {"path": str(folder)}},
            kernel_manager_class=ThisPython,
            timeout=CELL_TIMEOUT,
            coalesce_streams=True,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            on_cell_execute=self.begin,
            on_cell_executed=self.refuse_unknown_magic,
        )

    def begin(self, cell, cell_index):
        self.cell = cell

    @property
    def position(self):
        return f"cell {self.cells.index(self.cell) + 1 if self.cell else 0} of {len(self.cells)}"

    def refuse_unknown_magic(self, cell, cell_index, execute_reply):
        # IPython reports a magic that does not exist on stderr and carries on.
        if "UsageError" in stream(cell, "stderr"):
            raise RuntimeError("this cell's magic does not exist or was used wrongly")

    def execute(self, tick):
        """Run every cell; call `tick()` now and then. Raises `NotebookFailed`.

        The kernel is served by a thread, so that Ctrl-C arrives here, where it can end the kernel at once.
        """
        outcome, done = {}, threading.Event()

        async def serve():
            outcome["loop"], outcome["task"] = asyncio.get_running_loop(), asyncio.current_task()
            await self.client.async_execute()

        def thread():
            try:
                asyncio.run(serve())
            except BaseException as error:  # also CancelledError
                outcome["error"] = error
            finally:
                done.set()

        threading.Thread(target=thread, daemon=True).start()
        try:
            while not done.wait(0.5):  # not join(): before Python 3.13 it takes an interrupted thread for ended
                tick()
        except KeyboardInterrupt:
            if "task" in outcome:
                self.client.shutdown_kernel = "immediate"
                outcome["loop"].call_soon_threadsafe(outcome["task"].cancel)
                done.wait(10)
            raise
        if "error" in outcome:
            raise NotebookFailed(self.explain(outcome["error"])) from outcome["error"]

    def explain(self, error):
        if self.cell is None:
            return f"the kernel did not start: {error}"
        failure = [output for output in self.cell.outputs if output.output_type == "error"]
        text = stream(self.cell, "stdout") + stream(self.cell, "stderr")
        last = f"{failure[0].ename}: {failure[0].evalue}" if failure else str(error)
        return "\n".join([f"failed at {self.position}:", *shown(self.cell.source, head=True), *shown(text), last])


def shown(text, head=False):
    """The first or last lines of `text`, indented; nothing for an empty text."""
    lines = text.strip("\n").splitlines()
    kept = lines[:SHOWN_LINES] if head else lines[-SHOWN_LINES:]
    gap = ["    ..."] if len(kept) < len(lines) else []
    kept = [f"    {line}" for line in kept]
    return ["", *kept, *gap, ""] if head else [*gap, *kept, ""] if kept else []


def stream(cell, name):
    """What a cell printed to "stdout" or "stderr", as one string."""
    return "".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream" and o.name == name)


def headline(notebook):
    """The figure that a notebook announces: the last line printed that starts with `headline: `."""
    lines = "".join(stream(cell, "stdout") + "\n" for cell in notebook.cells).splitlines()
    found = [line.removeprefix("headline: ") for line in lines if line.startswith("headline: ")]
    return found[-1] if found else ""


def title(notebook):
    return notebook.cells[0].source.splitlines()[0].lstrip("# ")


def find_notebooks(folder, number=None):
    """The notebooks of a folder in their order, or only those with a number such as "03"."""
    return sorted(folder.glob(f"{number or '[0-9][0-9]'}_*.ipynb"))


def progress(text):
    """Return a function that shows `text`, what it is given and the seconds; on a terminal in one changing line."""
    start, live = time.monotonic(), sys.stdout.isatty()

    def show(detail="", end=False):
        line = f"{text} ... {detail}{time.monotonic() - start:.0f} s"
        if live:
            print(f"\r\x1b[K{line}", end="\n" if end else "", flush=True)
        elif end:
            print(line, flush=True)

    return show


def write(path, text):
    """Write by rename: a reader or an interrupt never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    os.replace(part, path)


def to_html(notebook, folder):
    """A page that needs no network: pictures are embedded, scripts (which would be fetched) are left out."""
    exporter = HTMLExporter(template_name="lab", embed_images=True)
    page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"path": str(folder)}})
    return re.sub(r"(?s)<script.*?</script>", "", page)


def index_page(folder):
    """The page that lists the executed notebooks of a folder."""
    rows = []
    for path in find_notebooks(folder):
        notebook = nbformat.read(path, as_version=4)
        result = notebook.metadata.ddp_tutorial
        link = f'<a href="{folder.name}/{path.stem}.html">{html.escape(title(notebook))}</a>'
        link += f' (<a href="{folder.name}/{path.name}">notebook</a>)'
        cells = [link, f"{result.seconds:.0f} s", html.escape(result.headline), result.finished]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>DDP, step by step</title>
<style>body {{ font-family: sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ padding: .4em 1em .4em 0; text-align: left; vertical-align: top }}
tr {{ border-bottom: 1px solid #ccc }}</style></head><body>
<h1>DDP, step by step</h1>
<table><tr><th>Notebook</th><th>Time</th><th>Result</th><th>Run on</th></tr>
{chr(10).join(rows)}
</table></body></html>
"""


def run(root, number=None):
    """Execute the series into build/. Returns the exit status."""
    notebooks, results = find_notebooks(root / "notebooks", number), root / "build" / "notebooks"
    table, failure = [], None
    for k, path in enumerate(notebooks, 1):
        run = Run(path, path.parent)
        start, show = time.monotonic(), progress(f"notebook {k} of {len(notebooks)}: {path.stem}")
        try:
            run.execute(lambda show=show, run=run: show(f"{run.position}, "))
        except NotebookFailed as error:
            failure = error
        show(end=True)
        seconds, found = time.monotonic() - start, headline(run.notebook) if not failure else "FAILED"
        finished = time.strftime("%Y-%m-%d %H:%M")
        run.notebook.metadata["ddp_tutorial"] = {"seconds": seconds, "headline": found, "finished": finished}
        write(results / path.name, nbformat.writes(run.notebook) + "\n")
        write(results / f"{path.stem}.html", to_html(run.notebook, path.parent))
        write(root / "build" / "index.html", index_page(results))
        table.append((path.stem, f"{seconds:.0f}", found))
        if failure:
            break
    width = max(len(name) for name, _, _ in table)
    for name, seconds, found in [("notebook", "seconds", "headline"), *table]:
        print(f"{name:{width}}  {seconds:>7}  {found}")
    print("\nRead them: build/index.html", flush=True)
    if failure:
        print(f"\n{path.stem} {failure}", file=sys.stderr)
    return 1 if failure else 0


def clean(notebook):
    """Keep only what is the same on every machine and in every run."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("text", "-").strip()]


def machine_names():
    """Patterns for the names that only this machine has: its own, its user's, the project's folder."""
    user, host = re.escape(getpass.getuser()), re.escape(socket.gethostname())
    names = [re.escape(str(Path.cwd())), rf"/{user}/|\b{user}@"]  # a user may be called "rank": not the bare word
    return names + ([rf"\b{host}\b"] if len(host) > 3 and host != "localhost" else [])


def output_problems(notebook, patterns=()):
    """What must not be committed in a notebook's outputs, one line a find; `patterns` are looked for too."""
    problems = []
    for n, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        if stream(cell, "stderr").strip():
            problems.append(f"cell {n} wrote to stderr: {stream(cell, 'stderr').strip().splitlines()[-1]}")
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "error":
                problems.append(f"cell {n} ended with {output.ename}: {output.evalue}")
            if len(data.get("image/png", "")) > LARGEST_PICTURE:
                problems.append(f"cell {n} has a picture of more than {LARGEST_PICTURE} characters: draw it smaller")
            shown = {**output, "data": {kind: data[kind] for kind in data if kind != "image/png"}}
            for found in (re.search(pattern, json.dumps(shown)) for pattern in (MACHINE_PATH, *patterns)):
                if found:
                    around = found.string[max(0, found.start() - 20) : found.end() + 20]
                    problems.append(f"cell {n} shows the machine ({found[0]}): {around}")
    return problems


def outputs(root, number=None):
    """Execute the series and its solutions in place. A notebook with a problem keeps its old outputs."""
    from ddp_tutorial.data import DataError, load_datasets

    try:
        load_datasets("mnist", say=None)
    except DataError as error:
        print(f"Committed outputs are those of the real MNIST. {error}", file=sys.stderr)
        return 2
    folder = root / "notebooks"
    notebooks = find_notebooks(folder, number) + find_notebooks(folder / "solutions", number)
    for k, path in enumerate(notebooks, 1):
        run = Run(path, path.parent)
        name = path.relative_to(folder).with_suffix("")
        show = progress(f"notebook {k} of {len(notebooks)}: {name}")
        try:
            run.execute(lambda show=show, run=run: show(f"{run.position}, "))
            show(end=True)
            clean(run.notebook)
            if problems := output_problems(run.notebook, machine_names()):
                raise NotebookFailed("\n".join(["is not fit to be committed:", *problems]))
        except NotebookFailed as error:
            print(f"\n{name} {error}\n\n{path.name} is as it was.", file=sys.stderr)
            return 1
        write(path, nbformat.writes(run.notebook) + "\n")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "outputs"])
    parser.add_argument("number", nargs="?", help="two digits, such as 03; all without")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if not find_notebooks(root / "notebooks", args.number):
        parser.error(f"no notebook is called notebooks/{args.number or 'NN'}_*.ipynb")
    try:
        return {"run": run, "outputs": outputs}[args.command](root, args.number)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr, flush=True)
        os._exit(130)  # nothing else runs: exit handlers would wait for a kernel that is gone


if __name__ == "__main__":
    sys.exit(main())
