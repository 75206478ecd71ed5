"""Output of the verbs: text without control characters, and JSON that every parser reads.

Names and messages come from files, servers and models. A control sequence in one could move the cursor or print a line in the
name of Dovetail, so each is shown as an escape (`\\x1b`): in lines (`print_line`, `print_error`), in what rich renders
(`SafeConsole`, in views/console.py), and in generated text (`print_text`). JSON escapes them itself.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from dovetail.base.errors import LINES, PROSE, printable
from dovetail.views.console import SafeConsole as SafeConsole

LONGEST_ERROR = 4000  # characters


def print_line(text: str) -> None:
    """Print a result on stdout, of one or several lines."""
    print(printable(text, None, LINES))


def print_note(text: str) -> None:
    """Print a note for people on stderr."""
    print(printable(text, None, LINES), file=sys.stderr)


def print_error(problem: object) -> None:
    """Print an error as one line on stderr."""
    print(f"dovetail: {printable(str(problem), LONGEST_ERROR)}", file=sys.stderr)


def print_text(text: str) -> None:
    """Print generated text on stdout at once, without a line end."""
    sys.stdout.write(printable(text, None, PROSE))
    sys.stdout.flush()


def to_json(data: Any, indent: int | None = None) -> str:
    """Return the data as standard JSON in ASCII. It has no NaN and no infinity: they become strings ("nan", "inf")."""
    return json.dumps(_standard(data), indent=indent, allow_nan=False)


def print_json(data: Any, indent: int | None = None) -> None:
    """Print the data as JSON on stdout."""
    print(to_json(data, indent))


def _standard(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _standard(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_standard(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
