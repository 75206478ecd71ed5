"""Stream: sample i of one corpus or of a weighted mixture, as a pure function of (seed, i).

    corpus     e0 e1 e2 e3 e4 e5 e6 e7 e8 …     window w is `length` tokens from w·length, and the one behind them as a label
    epoch      each window once, in the order of a permutation keyed by seed, epoch and corpus
    sample i   i → source and number within it (Choice) → epoch and index → window (Permutation)

The position of a run is one number, the samples so far. Ranks, workers and batch may differ at every resume.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import FileError, UsageError
from dovetail.data.order import Choice, Permutation
from dovetail.data.tokens import Tokens


class Window(NamedTuple):
    """The tokens of one sample."""

    ids: NDArray[np.int64]  # (length + 1,)
    ends: NDArray[np.int64]  # document ends e within it, 0 < e ≤ length: token e − 1 is the last of its document


class Stream:
    """An endless sequence of samples of `length` tokens, from a corpus or from (corpus, weight) pairs."""

    def __init__(self, sources: Tokens | Sequence[tuple[Tokens, float]], length: int, seed: int = 0) -> None:
        if length < 1:
            raise UsageError(f"length: {length} is not above 0")
        pairs = [(sources, 1.0)] if isinstance(sources, Tokens) else list(sources)
        self.sources, self.length, self.seed = [tokens for tokens, _ in pairs], length, seed
        self.weights = [float(weight) for _, weight in pairs]
        self.choice = Choice(self.weights)
        self.sizes = [windows_of(tokens, length) for tokens in self.sources]  # samples per epoch of each source

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that determines sample i; equal streams have equal ones."""
        corpora = [tokens.fingerprint for tokens in self.sources]
        data = json.dumps([corpora, self.weights, self.length, self.seed])
        return hashlib.sha256(data.encode()).hexdigest()

    def sample(self, number: int) -> Window:
        """Return one sample."""
        return self.samples(number, 1)[0]

    def samples(self, first: int, count: int) -> list[Window]:
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


def windows_of(tokens: Tokens, length: int) -> int:
    """Return the number of whole windows of a corpus; raise FileError where there is none."""
    count = (tokens.tokens - 1) // length
    if count < 1:
        raise FileError(f"{tokens.name}: {tokens.tokens:,} tokens are too few for samples of {length:,}; shorten them")
    return count


def window(tokens: Tokens, start: int, length: int) -> Window:
    """Return `length` tokens and the one behind them."""
    ids = tokens.read(start, start + length + 1).astype(np.int64)
    return Window(ids, np.unique(tokens.ends(start, start + length) - start))
