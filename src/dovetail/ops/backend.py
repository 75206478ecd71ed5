"""The data types of attention backends: the shape a cost depends on, and the backend itself. A leaf: imports no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Shape(NamedTuple):
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
    cost: Callable[[Shape, frozenset[str]], float]
    run: Callable[..., Tensor]
    dense: bool  # takes the mask as one tensor …
    flags: bool = False  # … or as a flag, where the mask is plain
    devices: tuple[str, ...] = ()  # the types of device it may run on; empty: all
