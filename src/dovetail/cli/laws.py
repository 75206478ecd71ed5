"""Run the laws, property tests generated from the spec: on all parts, on one spec, on a model of another library, or on a
running server.

    dovetail laws llama-tiny --swap position=alibi
    dovetail laws py:model.py:tiny --only causal padded
    dovetail laws http://localhost:8000/v1
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.cli.command import Options
from dovetail.cli.output import SafeConsole, print_json
from dovetail.cli.printing import shown

if TYPE_CHECKING:
    from dovetail.api.laws import Progress


def run(given: Options, json: bool) -> int:
    """Check, print, and return 1 where a law fails."""
    from dovetail.api.laws import laws

    # a result is printed when it is known: on stdout, or with --json, whose object comes last, on stderr
    with shown_progress() as progress:
        result = laws(
            **given,
            announce=announced,
            progress=progress,
            shown=lambda row: shown(lambda _: row, sys.stderr if json else sys.stdout),
        )
    if json:
        print_json(result.to_dict(), indent=1)
    else:
        shown(lambda _: result.summary())
    return 1 if result.failed else 0


def announced(line: str) -> None:
    """Print the planned requests to a server, on stderr."""
    SafeConsole(file=sys.stderr).print(line, highlight=False, markup=False)


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function progress(done, in all, note): a bar on stderr with the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("laws"), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.fields[note]}", markup=False))
    console = SafeConsole(file=sys.stderr)
    # rich would print results that are meant for a pipe on the terminal of the bar
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("laws", total=None, note="")
        yield lambda done, known, note: bar.update(task, completed=done, total=known, note=note)
