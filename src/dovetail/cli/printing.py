"""How verbs print a result: on the terminal in its width, as JSON, and as an HTML page; its events when they are known."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dovetail.cli.output import print_error, print_json, print_note
from dovetail.disk.atomic import write_new
from dovetail.views.blocks import View, renderable
from dovetail.views.console import WIDE, SafeConsole

if TYPE_CHECKING:
    from dovetail.api.result import Event, Result
    from dovetail.hf.load import Watch


class Printer:
    """Prints a result at the end, and its events when they are known: as text, which with --json goes to stderr, or with
    --jsonl as one JSON object per line."""

    def __init__(self, json: bool, jsonl: bool = False, html: Path | None = None, force: bool = False) -> None:
        self.json, self.jsonl, self.html, self.force = json, jsonl, html, force
        self.events = 0

    def event(self, event: Event) -> None:
        """Print an event at once, also into a pipe."""
        self.events += 1
        if self.jsonl:
            print_json(event.to_dict())
            sys.stdout.flush()
        else:
            shown(event.view, sys.stderr if self.json else sys.stdout)

    def end(self, result: Result) -> int:
        """Write the page of a result if a path is given, and print the result; return its exit code."""
        if self.html is not None:
            write_new(self.html, result.to_html(), self.force)
        if self.jsonl:
            print_json({"event": "result", **result.to_dict()})
        elif self.json:
            print_json(result.for_json())
        else:
            shown(result.rest if self.events else result.view)
        if result.remark:
            print_note(result.remark)
        return result.exit_code


def print_result(result: Result, json: bool) -> int:
    """Print a result, with its remark on stderr; return its exit code."""
    return Printer(json).end(result)


def shown(view: Callable[[int], View], stream: IO[str] | None = None) -> None:
    """Print a view in the width of the terminal, on stdout unless another stream is given, at once."""
    console = SafeConsole(file=stream)
    if not console.is_terminal:
        console = SafeConsole(file=stream, width=WIDE)
    console.print(renderable(view(console.width)), highlight=False, crop=False)
    console.file.flush()


@contextmanager
def shown_loading(name: str) -> Iterator[Watch]:
    """Yield a function watch(bytes read, bytes in total) that moves a progress bar; print the warnings of the load."""
    from dovetail.hf.tensors import DroppedTensors
    from dovetail.views.progress import delayed_bar

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DroppedTensors)
        with delayed_bar("reading {task.description}", name, ends=True) as watch:
            yield watch
    for warning in caught:
        print_error(f"{name}: {warning.message}")
