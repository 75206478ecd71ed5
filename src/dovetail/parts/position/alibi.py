"""ALiBi: a bias on the scaled scores, linear in the distance, with one slope per head; no weights, any length.

score(i, j) −= slope_h · |i − j|      slopes 2^(−8/h), 2^(−16/h), … for h a power of two; otherwise those of the power
below, then every second one of the power above.                                              Press et al. 2022
"""

from __future__ import annotations

from math import floor, log2

import torch
from torch import Tensor

from dovetail.core.group import Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.part import register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight


@register("alibi")
class Alibi(Position):
    """ALiBi: scores fall linearly with distance."""

    slope = "slope"

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="slope", out=("heads",), role="const")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.tensor(slopes(scope.size("heads")), dtype=torch.float64)

    def needs(self) -> frozenset[str]:
        return frozenset({"bias"})


def slopes(heads: int) -> list[float]:
    """The slope of each head."""
    below = 2 ** floor(log2(heads))
    series = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return series + [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]


class AlibiModule(PositionModule, of=Alibi):
    """score -> (…, heads, n, m)."""

    slope: Tensor

    def tables(self) -> tuple[Tensor, ...]:
        return (self.slope,)

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        (slope,) = tables
        distance = (q.order[..., None, :, None] - k.order[..., None, None, :]).abs()
        return -distance.to(slope.dtype) * slope[:, None, None]
