"""Position as a bias on the scores of attention.

ALiBi: a bias on the scaled scores, linear in the distance, with one slope per head; no weights, any length.

score(i, j) −= slope_h · |i − j|      slopes 2^(−8/h), 2^(−16/h), … for h a power of two; otherwise those of the power
below, then every second one of the power above.                                              Press et al. 2022

T5's relative position bias: a learned number per head and bucket of distance, added to the scores.

Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`. A bidirectional model uses
half of all buckets for later keys.                                                                   Raffel et al. 2020
"""

from __future__ import annotations

from math import floor, log, log2

import torch
from torch import Tensor

from dovetail.nn.groups import Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


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


@register("t5_bias")
class T5Bias(Position):
    """T5 relative position bias: a learned number per head and bucket of distance."""

    buckets: int = bounded(32, at_least=4)
    max_distance: int = bounded(128, above=0)
    bidirectional: bool = False
    shared: bool = True  # one table for all layers of a stack, stored in the first

    def axes(self, scope: Scope) -> Scope:
        return scope.add(bucket=self.buckets)

    def weights(self, scope: Scope) -> list[Weight]:
        first = f"{scope.in_layer(0)}.table" if self.shared and scope.layer > 0 else None
        return [Weight(name="table", out=("heads",), inp=("bucket",), role="embed", same_as=first)]

    def needs(self) -> frozenset[str]:
        return frozenset({"bias", "bias_grad"})

    def check(self, scope: Scope) -> list[Problem]:
        if self.buckets % 4:
            return [Problem("buckets", f"{self.buckets} is not a multiple of 4", "use a multiple of 4, such as 32")]
        exact = self.buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            return [
                Problem("max_distance", f"{self.max_distance} is not above {exact}, the distances with a bucket of their own")
            ]
        return []


class T5BiasProof(Proof, of=T5Bias):
    """Sampled values and idle fields."""

    samples = {"buckets": [8, 12], "max_distance": [16, 20], "bidirectional": [False, True], "shared": [True, False]}

    def idle(self, part: T5Bias, scope: Scope) -> frozenset[str]:
        return frozenset() if scope.layer else frozenset({"shared"})


class T5BiasModule(PositionModule, of=T5Bias):
    """score -> (…, heads, n, m)."""

    part: T5Bias
    table: Tensor  # (heads, buckets)

    def tables(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        (table,) = tables
        bucket = self.bucket(q.order[..., :, None] - k.order[..., None, :])
        return table[:, bucket].movedim(0, -3)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance q − k."""
        count, later = self.part.buckets, torch.zeros_like(distance)
        if self.part.bidirectional:
            count //= 2
            later = (distance < 0).long() * count
            distance = distance.abs()
        else:
            distance = distance.clamp_min(0)
        exact = count // 2
        ratio = torch.log(distance.clamp_min(1).to(torch.float32) / exact) / log(self.part.max_distance / exact)
        coarse = (exact + (ratio * (count - exact)).long()).clamp_max(count - 1)
        return later + torch.where(distance < exact, distance, coarse)
