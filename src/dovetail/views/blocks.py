"""What a result shows, as data: lines and tables of text. console.py renders it on a terminal, page.py in a notebook.

["written to out", styled(("passed", "green"), " all"), TextTable(("law", "seconds"), rows, right=("seconds",))]
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from dovetail.views.console import plain_table, render_text, terminal_width, unwrapped
from dovetail.views.page import Page, body

PAGE_WIDTH = 100  # columns of what a page shows as a terminal does


@dc.dataclass(frozen=True)
class StyledText:
    """A line, or a cell of a table, of pieces with a style each: `bold`, `dim`, a color."""

    pieces: tuple[str | tuple[str, str], ...]

    def __str__(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece[0] for piece in self.pieces)


Cell = str | StyledText


@dc.dataclass(frozen=True)
class TextTable:
    """A table of text; the columns named in `right` are right-aligned."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    header: bool = True
    widths: tuple[int, ...] = ()  # the least widths of the first columns, of a table whose rows are printed one at a time


# a string is never wrapped, since it may hold a path to copy
View: TypeAlias = "str | StyledText | TextTable | RenderableType | Sequence[View]"


def styled(*pieces: str | tuple[str, str]) -> StyledText:
    """Return a line or a cell of pieces: text, or (text, style)."""
    return StyledText(pieces)


def renderable(view: View) -> RenderableType:
    """Return a view as something that rich renders."""
    if isinstance(view, str):
        return unwrapped(view)
    if isinstance(view, StyledText):
        return Text.assemble(*view.pieces)
    if isinstance(view, TextTable):
        table = plain_table(*view.columns, right=view.right, header=view.header)
        for column, width in zip(table.columns, view.widths, strict=False):
            column.min_width = width
        for row in view.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else renderable(cell) for cell in row))
        return table
    return Group(*map(renderable, view)) if isinstance(view, Sequence) else view


def result_text(view: Callable[[int], View]) -> str:
    """Return what a terminal shows, without colors, in its width."""
    width = terminal_width()
    return render_text(renderable(view(width)), width)


def result_page(title: str, view: View) -> Page:
    """Return a view as a page: tables are tables, and what only a terminal shows keeps its form."""
    return Page(title, body("result.html", title=title, blocks=list(_blocks(view))))


def _blocks(view: View) -> Iterator[tuple[str, object]]:
    """Yield (form, content): lines, a table, or text that keeps the form that it has on a terminal."""
    if isinstance(view, str | StyledText):
        if text := str(view).strip("\n"):
            yield "lines", text
    elif isinstance(view, TextTable):
        yield "table", view
    elif isinstance(view, Sequence):
        for block in view:
            yield from _blocks(block)
    else:
        yield "terminal", render_text(view, PAGE_WIDTH)
