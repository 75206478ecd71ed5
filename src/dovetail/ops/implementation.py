"""Which form of a computation runs: the reference implementation, or the fastest that fits. A setting of a run, not of a spec.

with using("reference"): …      only this backend; recurrences run token by token

And the data types of attention backends: the shape a cost depends on, and the backend itself. No kernel is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

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


class ProblemSize(NamedTuple):
    """The sizes that the cost of a backend depends on."""

    rows: int
    queries: int
    keys: int
    heads: int
    head: int
    plain: bool  # the mask is exactly a kernel's own causal flag, or no mask at all
    touched: int  # scores per head and row in the tiles that the mask touches


class Backend(NamedTuple):
    """One way to compute attention."""

    name: str
    offers: frozenset[str]
    cost: Callable[[ProblemSize, frozenset[str]], float]
    run: Callable[..., Tensor]
    dense: bool  # takes the mask as one tensor …
    flags: bool = False  # … or as a flag, where the mask is plain
    devices: tuple[str, ...] = ()  # the types of device it may run on; empty: all
