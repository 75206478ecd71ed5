"""The order of samples, a pure function of their number: no shuffled index is stored, so none has to be saved.

    Permutation   a Feistel network of 8 rounds over ⌈log₂ size⌉ bits      (l, r) → (r, l ⊕ F(r, key))
                  a result outside 0 … size − 1 goes through it again until it is inside (cycle walking)
    Choice        sample i is from the source whose interval holds frac(i·φ): [0, w₀), [w₀, w₀ + w₁), …
                  among the first n samples, source k has n·w_k of them up to a few, for every n

φ is the golden ratio, in 64-bit integers; the number of earlier samples of a source is a sum of floors, in O(log) steps.
                                      Luby & Rackoff 1988; Black & Rogaway 2002 (cycle walking); Kuipers & Niederreiter 1974
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import UsageError

ROUNDS = 8
MODULUS = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio, odd
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # SplitMix64, Steele et al. 2014


class Permutation:
    """A permutation of 0 … size − 1 that is keyed by text: seed, epoch and corpus."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self.bits = (bits - bits // 2, bits // 2)  # of the left and the right half
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(digest, "<u8")

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images (n,) of indices (n,)."""
        if len(index) and (index.min() < 0 or index.max() >= self.size):
            raise IndexError(f"an index is not from 0 to {self.size - 1:,}")
        image = self._network(index.astype(np.uint64))
        while len(outside := np.flatnonzero(image >= self.size)):
            image[outside] = self._network(image[outside])
        return image.astype(np.int64)

    def _network(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left_bits, right_bits = self.bits
        left, right = x >> np.uint64(right_bits), x & np.uint64(2**right_bits - 1)
        for key in self.keys:
            mask = np.uint64(2**left_bits - 1)
            left, right = right, left ^ (_mixed(right + key) & mask)
            left_bits, right_bits = right_bits, left_bits
        return left << np.uint64(right_bits) | right


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return x ^ (x >> np.uint64(31))


class Choice:
    """Which source each sample is from, and how many samples of that source are before it."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise UsageError(f"weights: {list(weights)} must be finite and above 0")
        upto = list(itertools.accumulate(map(Fraction, weights)))  # exact, so that no prefix drifts
        self.bounds = [0, *(int(part / upto[-1] * MODULUS) for part in upto)]

    def __call__(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(count,) the source of each of the samples first, first + 1, …, and (count,) its number within the source."""
        numbers = np.arange(count, dtype=np.uint64) + np.uint64(first % MODULUS)
        upper = np.array(self.bounds[1:-1], np.uint64)
        source = np.searchsorted(upper, numbers * np.uint64(GOLDEN), side="right").astype(np.int64)
        number = np.zeros(count, np.int64)
        for which in np.unique(source).tolist():
            of_it = source == which
            number[of_it] = self.before(first, which) + np.arange(int(of_it.sum()))
        return source, number

    def before(self, count: int, source: int) -> int:
        """Return how many of the first `count` samples are from a source."""
        return _below(count, self.bounds[source + 1]) - _below(count, self.bounds[source])


def _below(count: int, bound: int) -> int:
    """Return how many j < count have (j · GOLDEN mod MODULUS) < bound: Σ ⌊x/m⌋ − ⌊(x − bound)/m⌋ over x = j · GOLDEN."""
    return floor_sum(count, MODULUS, GOLDEN, 0) - floor_sum(count, MODULUS, GOLDEN, MODULUS - bound) + count


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return Σ ⌊(a·i + b)/m⌋ over i < n, by the steps of Euclid's algorithm; a, b ≥ 0."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        n, b, m, a = top // m, top % m, a, m
    return total
