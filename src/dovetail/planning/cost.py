"""What one rank does in a training step, as counts. Plain data, no torch.

    products       (dtype, FLOPs, bytes) -> how often           matrix products and attention
    kernels, moved all other kernels: how many, and the bytes that they read and write
    traffic        (kind, group) -> calls and bytes             of the whole tensor: what an all-gather returns, what a
                                                                reduce-scatter takes, what an all-reduce sums

Counts add. Equal layers and equal micro-batches have equal counts, so that n of them cost n times one.
"""

from __future__ import annotations

import dataclasses as dc
from collections import Counter
from typing import NamedTuple


class MatrixProduct(NamedTuple):
    """A matrix product or attention: the dtype that it computes in, its FLOPs, and the bytes that it reads and writes."""

    dtype: str
    flops: int
    bytes: int


class RankGroup(NamedTuple):
    """The ranks of a collective: how many, and the distance between neighbors."""

    ranks: int
    stride: int

    def on_node(self, per_node: int) -> int:
        """The number of its ranks on one node of `per_node` ranks."""
        return min(self.ranks, max(1, per_node // self.stride))

    def nodes(self, per_node: int) -> int:
        """The number of nodes that it spans."""
        return -(-self.ranks // self.on_node(per_node))


class Collective(NamedTuple):
    """A kind of collective over a group of ranks."""

    kind: str  # all-gather, all-reduce, reduce-scatter, broadcast, send …
    group: RankGroup


class Traffic(NamedTuple):
    """Calls of a collective, and the bytes of their tensors."""

    calls: int
    bytes: int


@dc.dataclass
class StepCost:
    """Counts of products, other kernels and collectives."""

    products: Counter[MatrixProduct] = dc.field(default_factory=Counter)
    kernels: int = 0
    moved: int = 0
    traffic: dict[Collective, Traffic] = dc.field(default_factory=dict)

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and attention."""
        return sum(one.flops * count for one, count in self.products.items())

    @property
    def communicated(self) -> int:
        """Bytes of all collectives."""
        return sum(one.bytes for one in self.traffic.values())

    def send(self, collective: Collective, calls: int, size: int) -> None:
        """Count calls of a collective, and the bytes of their tensors."""
        before = self.traffic.get(collective, Traffic(0, 0))
        self.traffic[collective] = Traffic(before.calls + calls, before.bytes + size)

    def plus(self, other: StepCost, times: int = 1) -> StepCost:
        """The cost of this and `times` the other; with a negative number, of this without the other."""
        kernels, moved = self.kernels + times * other.kernels, self.moved + times * other.moved
        total = StepCost(Counter(self.products), kernels, moved, dict(self.traffic))
        for product, count in other.products.items():
            total.products[product] += times * count
        for key, (calls, size) in other.traffic.items():
            total.send(key, times * calls, times * size)
        total.products = Counter({product: count for product, count in total.products.items() if count})
        total.traffic = {key: one for key, one in sorted(total.traffic.items()) if one != (0, 0)}
        return total

    @property
    def possible(self) -> bool:
        """Whether no count is below 0."""
        return min([self.kernels, *self.products.values(), *(one.calls for one in self.traffic.values())]) >= 0


class Memory(NamedTuple):
    """Bytes of one rank. `peak` is the most that is alive at one time in a step."""

    weights: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def activations(self) -> int:
        """What the peak has beyond weights, gradients and optimizer state: activations, gathered weights, temporary tensors."""
        return self.peak - self.weights - self.gradients - self.optimizer


@dc.dataclass(frozen=True)
class StepTrace:
    """One step of one rank: the parameters that it stores, the cost of the step, and its memory."""

    parameters: int
    cost: StepCost
    memory: Memory
    peaks: dict[str, int] = dc.field(default_factory=dict, repr=False)  # segment of the step -> the most bytes alive in it
