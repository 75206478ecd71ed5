"""Which form of a computation runs: the reference implementation, or the fastest that fits. A setting of a run, not of a spec.

with using("reference"): …      only this backend; recurrences run token by token
"""

from __future__ import annotations

FORCED: list[str] = []  # the names given to `using`, innermost last; empty: any backend
CHUNK = 64  # tokens per chunk of a chunked recurrence


class using:
    """Within this context only the named backend may run: `with using("reference"): …`"""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        FORCED.append(self.name)

    def __exit__(self, *_: object) -> None:
        FORCED.pop()


def forced() -> str | None:
    """The only backend that may run; None: any."""
    return FORCED[-1] if FORCED else None


def reference() -> bool:
    """Whether the reference implementation runs; recurrences then go token by token."""
    return forced() == "reference"


def chunk() -> int:
    """Tokens per chunk of a chunked recurrence."""
    return CHUNK
