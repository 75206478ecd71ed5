"""How verbs print a result: on the terminal in its width, and as an HTML page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from dovetail.look.console import WIDE, SafeConsole

if TYPE_CHECKING:
    from dovetail.api.result import PageResult, Result


def print_view(result: Result) -> None:
    """Print a result in the width of the terminal."""
    shown(result.view)


def shown(view: Callable[[int], RenderableType]) -> None:
    """Print a view in the width of the terminal."""
    console = SafeConsole()
    if not console.is_terminal:
        console = SafeConsole(width=WIDE)
    console.print(view(console.width), highlight=False)


def write_page(path: Path | None, result: PageResult) -> None:
    """Write the page of a result, where a path is given."""
    from dovetail.io.atomic import write_atomically

    if path is not None:
        write_atomically(path, result.to_html())
