"""How verbs print a result: on the terminal in its width, and as an HTML page."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import RenderableType

from dovetail.views.console import WIDE, SafeConsole

if TYPE_CHECKING:
    from dovetail.api.result import PageResult, Result


def print_view(result: Result) -> None:
    """Print a result in the width of the terminal."""
    shown(result.view)


def shown(view: Callable[[int], RenderableType], stream: IO[str] | None = None) -> None:
    """Print a view in the width of the terminal, on stdout unless another stream is given, at once."""
    console = SafeConsole(file=stream)
    if not console.is_terminal:
        console = SafeConsole(file=stream, width=WIDE)
    console.print(view(console.width), highlight=False, crop=False)
    console.file.flush()


def options(command: Any, *without: str) -> dict[str, Any]:
    """Return the flags of a verb by name: the arguments of the function that it calls. `without` are those of the output."""
    return {field.name: getattr(command, field.name) for field in dc.fields(command) if field.name not in without}


def write_page(path: Path | None, result: PageResult, force: bool) -> None:
    """Write the page of a result if a path is given; an existing file is replaced if `force`."""
    from dovetail.api.output import write_new

    if path is not None:
        write_new(path, result.to_html(), force)
