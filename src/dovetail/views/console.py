"""Text that rich renders: on a terminal, or as a string.

Names and messages come from files, servers and models. A control sequence in one could move the cursor, so each is shown as an
escape (`\\x1b`).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dovetail.base.errors import LINES, printable

WIDE = 150  # columns where there is no terminal


class SafeConsole(Console):
    """A rich console that shows control characters of what it renders as escapes; its own (colors, cursor) are not affected."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, None, LINES))


def terminal_width() -> int:
    """Return the columns of the terminal (or of the variable COLUMNS); WIDE where there is none."""
    return shutil.get_terminal_size((WIDE, 24)).columns


def render_text(renderable: RenderableType, width: int) -> str:
    """Return the lines that a renderable prints in `width` columns, without colors."""
    console = SafeConsole(file=StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable, highlight=False, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def unwrapped(text: str) -> Group:
    """Return text whose lines stay whole, however narrow the terminal is: they hold paths to copy."""
    return Group(Text(text, no_wrap=True, overflow="ignore"))  # in a group, since print joins bare texts and wraps the result


def plain_table(*names: str, right: Collection[str] = (), header: bool = False) -> Table:
    """Return a table without lines; the columns named in `right` are right-aligned."""
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
