"""A mutant: a named bug, and what it takes to plant it.

    Mutant("a token sees the next one", "causal", instead(Causal, "visible", one_ahead))

Each area of the code has a file of them (`planted_….py`: the bent functions and the table of rows); `mutants.py` runs them all.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dovetail.io.spec import from_yaml
from dovetail.model import Model
from dovetail.ops import attend

BASE = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
head: {kind: lm, tied: false}
"""


def spec(width: int = 28, **mixer: Any) -> Model:
    """A small Llama with a mixer of its own."""
    made = from_yaml(BASE).set("width", width)
    for name, value in mixer.items():
        made = made.set(f"layers.*.mixer.{name}", value)
    return made


@dc.dataclass(frozen=True)
class Mutant:
    """A bug: what it is, which law must see it, where it is planted, how; the public report it replants, if any."""

    name: str
    law: str
    plant: Callable[[], AbstractContextManager[Any]]
    spec: Model = dc.field(default_factory=spec)
    report: str = ""


def kernel(name: str, run: Callable[..., Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Another function in place of a backend's."""
    bent = [backend._replace(run=run) if backend.name == name else backend for backend in attend.BACKENDS]
    return lambda: patch.object(attend, "BACKENDS", bent)


def instead(owner: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Another function in place of the one called `name`."""
    return lambda: patch.object(owner, name, new)
