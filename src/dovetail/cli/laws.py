"""Run the laws, property tests generated from the spec: on all parts, on one spec, on a model of another library, or on a
running server.

    dovetail laws llama-tiny --swap position=alibi
    dovetail laws py:model.py:tiny --only causal padded
    dovetail laws http://localhost:8000/v1
"""

from __future__ import annotations

from dovetail.cli.command import Options
from dovetail.cli.output import print_note
from dovetail.cli.printing import Printer
from dovetail.views.progress import step_bar


def run(given: Options, printer: Printer) -> int:
    """Check, print, and return 1 where a law fails."""
    from dovetail.api.laws import laws

    with step_bar("laws") as move:

        def progress(done: int, known: int, note: str) -> None:
            move(note, done, known)

        result = laws(**given, announce=print_note, progress=progress, watch=printer.event)
    return printer.end(result)
