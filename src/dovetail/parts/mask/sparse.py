"""Sparse masks: strided, dilated, random blocks.

    strided        (q − k) mod step = 0                              Child et al. 2019 (Sparse Transformer's columns)
    dilated        (q − k) mod step = 0 and |q − k| < size·step      Beltagy et al. 2020
    random_blocks  blocks a ≥ b see each other if b is one of `count` picks h(seed, a, i) mod (a + 1)
                                                                     Zaheer et al. 2020 (BigBird)

In a strided or dilated mask, tokens see only tokens of their own residue modulo `step`. The tiled kernel sorts tokens by
residue, so that its tiles are full or empty. A random pick depends on block numbers alone: it is the same for any length,
chunking or batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.groups import Fill, Mask, Span
from dovetail.nn.layout import TokenLayout
from dovetail.parts.mask.distance import _within, distance
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import Proof

MAX_PICKS = 256  # random blocks of one block: each is compared with every block of keys


@register("strided")
class Strided(Mask):
    """Every step-th token, counted from the token itself."""

    step: int = bounded(64, at_least=2)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        return distance(q, k) % self.step == 0

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return _same_residue(q, k, self.step)

    def regroup(self) -> int:
        return self.step

    def relative(self) -> bool:
        return True


class StridedProof(Proof, of=Strided):
    """Sampled values."""

    samples = {"step": [2, 3]}


@register("dilated")
class Dilated(Mask):
    """A dilated sliding window: `size` tokens on either side, `step` apart."""

    size: int = bounded(64, above=0)
    step: int = bounded(2, at_least=2)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        apart = distance(q, k)
        return (apart % self.step == 0) & (apart.abs() < self.size * self.step)

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        most = self.size * self.step - 1
        near = _within(q.low - k.high, q.high - k.low, -most, most)
        return min(near, _same_residue(q, k, self.step), key=lambda fill: fill.value)

    def reach(self) -> int | None:
        return (self.size - 1) * self.step + 1

    def regroup(self) -> int:
        return self.step

    def relative(self) -> bool:
        return True


class DilatedProof(Proof, of=Dilated):
    """Sampled values."""

    samples = {"size": [3, 5], "step": [2, 3]}


def _same_residue(q: Span, k: Span, step: int) -> Fill:
    """The fill of a tile whose tokens are sorted by residue: most tiles have one residue, and are full or empty."""
    if q.step != step or k.step != step:
        return Fill.PART
    if q.residue_low > k.residue_high or k.residue_low > q.residue_high:
        return Fill.EMPTY
    return Fill.FULL if q.residue_low == q.residue_high == k.residue_low == k.residue_high else Fill.PART


@register("random_blocks")
class RandomBlocks(Mask):
    """Random block attention: each block of tokens sees `count` earlier blocks, picked by a hash."""

    size: int = bounded(64, above=0)
    count: int = bounded(2, above=0, at_most=MAX_PICKS)
    seed: int = bounded(0, at_least=0)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        a, b = q.order // self.size, k.order // self.size
        of_a, of_b = (self.picks(block) for block in (a, b))
        visible = torch.zeros((), dtype=torch.bool, device=a.device)
        for i in range(self.count):  # a block picks earlier blocks only, so of two blocks only the later can pick the other
            picked = (of_a[..., i][..., :, None] == b[..., None, :]) | (a[..., :, None] == of_b[..., i][..., None, :])
            visible = visible | picked
        return visible[..., None, :, :]

    def picks(self, block: Tensor) -> Tensor:
        """(…, count) the blocks that each block (…) picks."""
        return _hash(block[..., None], torch.arange(self.count, device=block.device), self.seed) % (block[..., None] + 1)

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        a, b = (range(span.low // self.size, span.high // self.size + 1) for span in (q, k))
        picked = any(pick in b for block in a for pick in _picks(block, self.count, self.seed))
        picked = picked or any(pick in a for block in b for pick in _picks(block, self.count, self.seed))
        return Fill.EMPTY if not picked else Fill.FULL if len(a) == len(b) == 1 else Fill.PART


class RandomBlocksProof(Proof, of=RandomBlocks):
    """Sampled values."""

    samples = {"size": [3, 4], "count": [1, 2], "seed": [0, 7]}


@lru_cache(maxsize=2**16)
def _picks(block: int, count: int, seed: int) -> tuple[int, ...]:
    """The blocks that one block picks."""
    return tuple(_hash(block, i, seed) % (block + 1) for i in range(count))


def _hash(block: Any, pick: Any, seed: int) -> Any:
    """A 31-bit hash of integers, the same for Python ints and integer tensors."""
    mixed = (block * 0x9E3779B1 + pick * 0x85EBCA6B + seed * 0xC2B2AE35 + 0x27D4EB2F) & 0x7FFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return mixed ^ (mixed >> 15)
