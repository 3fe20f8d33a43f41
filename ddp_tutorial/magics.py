"""The notebook magics ``%%part``, ``%launch`` and ``%%launch``.

They print at least one line, and raise one readable line of their own. They never raise IPython's UsageError: nbval
does not see it, so that a cell that did nothing would pass.
"""

import re

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from ddp_tutorial import launch as launching
from ddp_tutorial import parts

FIRST_LINE = re.compile(r"%%(part|launch)(?:[ \t]+(.*))?$")


@magics_class
class TutorialMagics(Magics):
    @no_var_expand  # IPython would replace $name and {name} in the line
    @line_cell_magic
    def part(self, line, cell=None):
        """%%part PATH NAME [--after NAME]: this cell is the section NAME of the script at PATH."""
        try:
            if cell is None:
                raise parts.PartError(f"a section is a whole cell, its first line {parts.USAGE}")
            path, name, after = parts.parse_line(line)
            print(parts.write_part(path, name, cell, after))
        except parts.PartError:
            print("%%part: refused, no file was changed")
            raise

    @no_var_expand
    @line_cell_magic
    def launch(self, line, cell=None):
        """%launch [--deadline SECONDS] [--expect-failure] COMMAND, or %%launch with one command a line below it."""
        launching.launch(line, cell, self.shell.user_ns)


def keep_cell_whole(lines):
    """An input transformer: hand our cells to their magic as they are.

    IPython would raise UsageError for a cell without a body, and take ``...`` or ``>>>`` at its start for a prompt.
    """
    rest = list(lines)
    while rest and not rest[0].strip():
        rest = rest[1:]
    match = rest and FIRST_LINE.match(rest[0].rstrip())
    if not match or rest[0].rstrip().endswith("?"):  # IPython's help
        return lines
    body = "".join(rest[1:]) or "\n"
    return [f"get_ipython().run_cell_magic({match[1]!r}, {match[2] or ''!r}, {body!r})\n"]


def load(shell):
    """Register the magics; loading twice is loading once."""
    shell.register_magics(TutorialMagics)
    unload(shell)
    shell.input_transformers_cleanup.insert(0, keep_cell_whole)


def unload(shell):
    """Take the input transformer back out; IPython keeps registered magics."""
    transformers = shell.input_transformers_cleanup
    transformers[:] = [each for each in transformers if getattr(each, "__name__", "") != keep_cell_whole.__name__]
