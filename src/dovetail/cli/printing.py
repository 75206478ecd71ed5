"""How verbs print a result: on the terminal in its width, as JSON, and as an HTML page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import RenderableType

from dovetail.cli.output import print_json, print_note
from dovetail.views.console import WIDE, SafeConsole

if TYPE_CHECKING:
    from dovetail.api.result import PageResult, Result


def print_result(result: Result, json: bool) -> int:
    """Print a result, with its remark on stderr; return its exit code."""
    if json:
        print_json(result.for_json())
    else:
        shown(result.view)
    if result.remark:
        print_note(result.remark)
    return result.exit_code


def shown(view: Callable[[int], RenderableType], stream: IO[str] | None = None) -> None:
    """Print a view in the width of the terminal, on stdout unless another stream is given, at once."""
    console = SafeConsole(file=stream)
    if not console.is_terminal:
        console = SafeConsole(file=stream, width=WIDE)
    console.print(view(console.width), highlight=False, crop=False)
    console.file.flush()


def write_page(path: Path | None, result: PageResult, force: bool) -> None:
    """Write the page of a result if a path is given; an existing file is replaced if `force`."""
    from dovetail.disk.atomic import write_new

    if path is not None:
        write_new(path, result.to_html(), force)
