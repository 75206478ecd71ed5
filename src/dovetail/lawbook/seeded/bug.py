"""A seeded bug: its name, the law that must fail, and the patch that seeds it.

    Mutant("a token sees the next one", "causal", instead(Causal, "visible", causal_sees_the_next))

Each area of the code has one file in this package: the wrong functions, and `mutants()`, which lists them. `run.py` collects
every file of the package and seeds the bugs one at a time.
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
    """A small Llama with these fields of its mixers set."""
    model = from_yaml(BASE).set("width", width)
    for name, value in mixer.items():
        model = model.set(f"layers.*.mixer.{name}", value)
    return model


@dc.dataclass(frozen=True)
class Mutant:
    """A bug: its name, the law that must fail, the context manager that seeds it, the spec it is tested on, and the public
    report of the same bug, if there is one."""

    name: str
    law: str
    seed: Callable[[], AbstractContextManager[Any]]
    spec: Model = dc.field(default_factory=spec)
    report: str = ""


def kernel(name: str, run: Callable[..., Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Replace the function of one attention backend."""
    backends = [backend._replace(run=run) if backend.name == name else backend for backend in attend.BACKENDS]
    return lambda: patch.object(attend, "BACKENDS", backends)


def instead(owner: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Replace the attribute `name` of a class or module."""
    return lambda: patch.object(owner, name, new)
