"""Which form of a computation runs: the readable one, or the fastest that fits. Settings of a run, never of a spec.

with using("reference"): …      only the backend of this name; recurrences take their readable form, token by token
"""

from __future__ import annotations

FORCED: list[str] = []  # the names that may run, the last one now; empty: any
CHUNK = 64  # tokens that a recurrence in chunks works on at once


class using:
    """Within this context only the named backend may run: `with using("reference"): …`"""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        FORCED.append(self.name)

    def __exit__(self, *_: object) -> None:
        FORCED.pop()


def forced() -> str | None:
    """The one name that may run now; None: any."""
    return FORCED[-1] if FORCED else None


def readable() -> bool:
    """Whether recurrences should run token by token."""
    return forced() == "reference"


def chunk() -> int:
    """Tokens at once, where a recurrence runs in chunks."""
    return CHUNK
