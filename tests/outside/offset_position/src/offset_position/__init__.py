"""Offset: scores fall with distance by a slope that each head learns.

score(i, j) −= slope_h · |i − j|          slope (heads,), all `start` at first: ALiBi (Press et al. 2022) that trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.groups import Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("offset")
class Offset(Position):
    """Scores fall with distance by a learned slope."""

    start: float = 0.1

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="slope", out=("heads",), init="const", role="gate")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.full((scope.size("heads"),), self.start, dtype=torch.float64)

    def needs(self) -> frozenset[str]:
        return frozenset({"bias", "bias_grad"})

    def check(self, scope: Scope) -> list[Problem]:
        return [] if self.start >= 0 else [Problem("start", f"{self.start} is below 0", "near tokens would count least")]


class OffsetProof(Proof, of=Offset):
    """Sampled values."""

    samples = {"start": [0.1, 0.4]}


class OffsetModule(PositionModule, of=Offset):
    """score -> (…, heads, n, m)."""

    slope: Tensor

    def tables(self) -> tuple[Tensor, ...]:
        return (self.slope,)

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        (slope,) = tables
        wide = at_least_fp32(slope.dtype)  # a score of 30 in bfloat16 would be off by up to 1/16
        distance = (q.order[..., None, :, None] - k.order[..., None, None, :]).abs()
        return -distance.to(wide) * slope.to(wide)[:, None, None]
