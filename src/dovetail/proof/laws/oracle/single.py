"""Build the module of a single part with literal weights, so that an oracle runs the part's own code.

module = alone(part("rmsnorm", eps=0.1), {"scale": [1.0, 2.0]}, dim="embed", embed=2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.ctx import Ctx
from dovetail.core.layout import TokenLayout
from dovetail.core.module import holder, make
from dovetail.core.part import KINDS, Part, walk, weights_of
from dovetail.core.scope import Scope

REAL = torch.float64


def part(kind: str, **fields: Any) -> Any:
    """A part by its kind."""
    return KINDS[kind](**fields)


def numbers(values: Any) -> Tensor:
    """A float64 tensor of literal numbers."""
    return torch.tensor(values, dtype=REAL)


def eye(size: int, times: float = 1.0) -> list[list[float]]:
    """`times` on the diagonal, as plain numbers."""
    return [[times if row == column else 0.0 for column in range(size)] for row in range(size)]


def alone(spec: Part, weights: Mapping[str, Any] | None = None, *, dim: str = "embed", **sizes: int) -> Any:
    """The module of one part in float64. `weights` gives every stored weight, by its path below the part; constants are the
    part's own; `sizes` are the axes that its parents would define, `dim` the axis of a norm."""
    scope = Scope(sizes=sizes, stack="layers").bind(dim=dim)
    module = make(spec, scope)
    given = dict(weights or {})
    for path, below, inside in walk(spec, scope):
        for weight in weights_of(below, inside):
            owner, leaf = holder(module, f"{path}.{weight.name}".lstrip("."))
            if weight.role == "const":
                value = below.constant(weight.name, inside)
                owner.register_buffer(leaf, value.to(REAL) if value.is_floating_point() else value, persistent=False)
            else:
                value = numbers(given.pop(f"{path}.{weight.name}".lstrip(".")))
                assert value.shape == weight.shape(inside), f"{weight.name}: {tuple(value.shape)} is not {weight.shape(inside)}"
                if weight.buffer:
                    owner.register_buffer(leaf, value)
                else:
                    owner.register_parameter(leaf, nn.Parameter(value))
    assert not given, f"{spec.kind} has no weights called {sorted(given)}"
    return module


def row(n: int, start: int = 0) -> TokenLayout:
    """One sequence of n tokens."""
    return TokenLayout.whole(1, n, start=start)


def ctx(n: int) -> Ctx:
    """The ctx of one sequence of n tokens."""
    return Ctx(layout=row(n))
