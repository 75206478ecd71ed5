"""Random numbers by coordinate: SplitMix64 as a hash of counters, with no state.

    mix(z)              z ← (z ⊕ z≫30)·a,   z ← (z ⊕ z≫27)·b,   z ⊕ z≫31                       64 bits -> 64 bits, a bijection
    draw(h, i, j, …)    h ← mix((h ⊕ i)·γ),   h ← mix((h ⊕ j)·γ),   …                          coordinates -> 64 random bits
    stream(seed, path)  draw(hash(path), seed)                                                 one stream per (seed, path)

Every number is a function of its own coordinates. A slice of a tensor is computed without the rest, each rank computes its
slice of the whole model's numbers, and recomputation or compilation changes nothing. A `torch.Generator` cannot do this: its
n-th number needs all numbers before it, and differs between devices.

mix(γ), mix(2γ), mix(3γ), … is the sequence of SplitMix64, which passes BigCrush; draw(h, 0), draw(h, 1), … are blocks of it.
Philox (Salmon et al. 2011) has the longer record, but takes 120 int64 operations for 128 bits where this takes 28. torch has
no kernel for either, so that each operation is a pass over memory: 100 M normal numbers take 2.5 times as long as torch.randn
(with Philox 5 times). Integers are int64, whose products wrap, on every device.
Steele, Lea and Flood 2014 (Fast splittable pseudorandom number generators); Box and Muller 1958.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

LONG = 2**64 - 1
WORD = 2**32 - 1


def signed(bits: int) -> int:
    """Return the int64 that has these 64 bits."""
    return bits - 2**64 if bits >> 63 else bits


GAMMA = signed(0x9E3779B97F4A7C15)
FIRST, SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(z: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 on each int64 of z."""
    # the masks turn arithmetic shifts into logical ones
    z = (z ^ ((z >> 30) & (2**34 - 1))) * FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def draw(stream: Tensor, *coordinates: Tensor) -> Tensor:
    """Return 64 random bits per coordinate tuple. Coordinates broadcast; give those of the smallest shapes first."""
    for coordinate in coordinates:
        stream = mix((stream ^ coordinate) * GAMMA)
    return stream


def streams(seed: Tensor, paths: Sequence[str]) -> Tensor:
    """Return the stream of (seed, path) for each path (len(paths),).

    In a compiled graph the seed must be an input. From a constant g++ would derive the range of every product, and all of them
    overflow: undefined behavior in C++, and the numbers come out equal. (As an input it also needs no new graph per step.)
    """
    return draw(torch.tensor([path_hash(path) for path in paths], device=seed.device), seed)


def path_hash(path: str) -> int:
    """Return 64 bits of a path: FNV-1a. Plain integers, which a compiler folds to a constant (it cannot trace hashlib)."""
    h = 0xCBF29CE484222325
    for character in path:
        h = ((h ^ ord(character)) * 0x100000001B3) & LONG
    return signed(h)


def words(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits, each from 0 to 2³² − 1."""
    return (bits >> 32) & WORD, bits & WORD


def normals(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent standard normal numbers per 64 bits, in float64 (Box–Muller).

    Float64, because rounding to a weight's dtype then hides the last bits of log and cos, in which devices differ.
    """
    high, low = words(bits)
    radius = torch.sqrt(-2.0 * torch.log((high.double() + 0.5) * 2.0**-32))
    angle = (low.double() + 0.5) * (2.0 * pi * 2.0**-32)
    return radius * torch.cos(angle), radius * torch.sin(angle)


def uniforms(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent numbers per 64 bits, uniform in (−1, 1), in float64."""
    high, low = words(bits)
    return (high.double() + 0.5) * 2.0**-31 - 1.0, (low.double() + 0.5) * 2.0**-31 - 1.0


class NumberBlock(NamedTuple):
    """Some rows and columns of a matrix of normal numbers: the stream (), row numbers (r,), and columns first … last − 1."""

    stream: Tensor
    rows: Tensor
    first: int
    last: int
    std: float

    @property
    def pairs(self) -> Tensor:
        """(p,) numbers of the column pairs that cover it: 64 bits give two numbers."""
        return torch.arange(self.first // 2, (self.last + 1) // 2)


def normal_block(block: NumberBlock) -> Tensor:
    """Return std times the standard normal numbers of a block (r, last − first), rounded to float32."""
    return _columns(block, normals(draw(block.stream, block.rows[:, None], block.pairs)))


def uniform_block(block: NumberBlock) -> Tensor:
    """Return std times the uniform numbers of a block (r, last − first), rounded to float32."""
    return _columns(block, uniforms(draw(block.stream, block.rows[:, None], block.pairs)))


def normal_blocks(blocks: Sequence[NumberBlock]) -> list[Tensor]:
    """Return normal_block of each, in one pass: the time of a small tensor is that of the calls."""
    pairs = [block.pairs for block in blocks]
    counts = [len(block.rows) * len(own) for block, own in zip(blocks, pairs, strict=True)]
    heights, widths = torch.tensor([len(block.rows) for block in blocks]), torch.tensor([len(own) for own in pairs])
    starts = torch.stack([block.stream for block in blocks]).repeat_interleave(heights)
    rows = draw(starts, torch.cat([block.rows for block in blocks])).repeat_interleave(widths.repeat_interleave(heights))
    columns = torch.cat([own.repeat(len(block.rows)) for block, own in zip(blocks, pairs, strict=True)])
    even, odd = normals(draw(rows, columns))
    return [_columns(block, own) for block, *own in zip(blocks, even.split(counts), odd.split(counts), strict=True)]


def _columns(block: NumberBlock, numbers: Sequence[Tensor]) -> Tensor:
    """Scale the even and the odd columns, and drop those that the first and the last pair have outside of the block."""
    skipped = block.first % 2
    both = torch.stack([(half * block.std).float() for half in numbers], -1).view(len(block.rows), -1)
    return both[:, skipped : skipped + block.last - block.first]
