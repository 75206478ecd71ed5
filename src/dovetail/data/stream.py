"""Stream: sample i of one corpus or of a weighted mixture, as a pure function of (seed, i). No shuffled index is stored.

    corpus     e0 e1 e2 e3 e4 e5 e6 e7 e8 …     window w is `length` tokens from w·length, and the one behind them as a label
    epoch      each window once, in the order of a permutation keyed by seed, epoch and corpus
    sample i   i → source and number within it (SourceChoice) → epoch and index → window (Permutation)

    Permutation   a Feistel network of 8 rounds over ⌈log₂ size⌉ bits      (l, r) → (r, l ⊕ F(r, key))
                  a result outside 0 … size − 1 goes through it again until it is inside (cycle walking)
    SourceChoice  sample i is from the source whose interval holds frac(i·φ): [0, w₀), [w₀, w₀ + w₁), …
                  among the first n samples, source k has n·w_k of them up to a few, for every n

φ is the golden ratio, in 64-bit integers; the number of earlier samples of a source is a sum of floors, in O(log) steps. The
position of a run is one number, the samples so far. Ranks, workers and batch may differ at every resume.
                                      Luby & Rackoff 1988; Black & Rogaway 2002 (cycle walking); Kuipers & Niederreiter 1974
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError, UsageError
from dovetail.data.corpora import CorpusTokens

# -- the order of samples ---------------------------------------------------------------------------------------------


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


class SourceChoice:
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


# -- samples ----------------------------------------------------------------------------------------------------------


class SampleWindow(NamedTuple):
    """The tokens of one sample."""

    ids: NDArray[np.int64]  # (length + 1,)
    ends: NDArray[np.int64]  # document ends e within it, 0 < e ≤ length: token e − 1 is the last of its document


class Stream:
    """An endless sequence of samples of `length` tokens, from a corpus or from (corpus, weight) pairs."""

    def __init__(self, sources: CorpusTokens | Sequence[tuple[CorpusTokens, float]], length: int, seed: int = 0) -> None:
        if length < 1:
            raise UsageError(f"length: {length} is not above 0")
        pairs = [(sources, 1.0)] if isinstance(sources, CorpusTokens) else list(sources)
        self.sources, self.length, self.seed = [tokens for tokens, _ in pairs], length, seed
        self.weights = [float(weight) for _, weight in pairs]
        self.choice = SourceChoice(self.weights)
        self.sizes = [windows_of(tokens, length) for tokens in self.sources]  # samples per epoch of each source

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that determines sample i; equal streams have equal ones."""
        corpora = [tokens.fingerprint for tokens in self.sources]
        data = json.dumps([corpora, self.weights, self.length, self.seed])
        return hashlib.sha256(data.encode()).hexdigest()

    def sample(self, number: int) -> SampleWindow:
        """Return one sample."""
        return self.samples(number, 1)[0]

    def samples(self, first: int, count: int) -> list[SampleWindow]:
        """Return the samples first, first + 1, …"""
        source, start = self.places(first, count)
        return [window(self.sources[s], at, self.length) for s, at in zip(source.tolist(), start.tolist(), strict=True)]

    def places(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(count,) the source, and (count,) the first token of each sample."""
        source, number = self.choice(first, count)
        start = np.zeros(count, np.int64)
        for which in np.unique(source).tolist():
            epoch, index = np.divmod(number[of_it := source == which], self.sizes[which])
            some = np.zeros(len(epoch), np.int64)
            for one in np.unique(epoch).tolist():
                some[epoch == one] = self._permutation(which, one)(index[epoch == one])
            start[of_it] = some * self.length
        return source, start

    def epochs(self, samples: int) -> list[float]:
        """Return how often each source was read after this many samples."""
        return [self.choice.before(samples, which) / size for which, size in enumerate(self.sizes)]

    def _permutation(self, which: int, epoch: int) -> Permutation:
        return Permutation(self.sizes[which], f"{self.seed} {epoch} {self.sources[which].fingerprint}")


def windows_of(tokens: CorpusTokens, length: int) -> int:
    """Return the number of whole windows of a corpus; raise FileError where there is none."""
    count = (tokens.tokens - 1) // length
    if count < 1:
        raise FileError(f"{tokens.name}: {tokens.tokens:,} tokens are too few for samples of {length:,}; shorten them")
    return count


def window(tokens: CorpusTokens, start: int, length: int) -> SampleWindow:
    """Return `length` tokens and the one behind them."""
    ids = tokens.read(start, start + length + 1).astype(np.int64)
    return SampleWindow(ids, np.unique(tokens.ends(start, start + length) - start))
