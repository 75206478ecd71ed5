"""Loader: the batches of one rank, read ahead by threads.

    global batch    samples p … p + batch − 1          rank r of w takes  p + ⌊batch·r/w⌋ … p + ⌊batch·(r + 1)/w⌋ − 1

The state is p, the number of samples that were consumed, and the fingerprint of the stream. World size, rank, workers and batch
are no part of it. What was read ahead and not consumed is read again after a resume. Documents that are packed in a row attend
to themselves alone:

    ids      a b c │ d e │ f g h        one window of 7 tokens and a label; │ ends a document
    tokens   a b c   d e   f g          labels   b c −  e −  g h       the last token of a document predicts nothing
    seg      0 0 0   1 1   2 2          order    0 1 2  0 1  0 1

With `length`, every window is cut into rows of that many tokens: the same tokens per batch, in shorter sequences.
"""

from __future__ import annotations

import collections
import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dovetail.base.errors import FileError, UsageError
from dovetail.data.corpora import CorpusTokens
from dovetail.data.corpus import Batch
from dovetail.data.stream import SampleWindow, Stream, window, windows_of
from dovetail.nn.layout import Known, TokenLayout
from dovetail.nn.loss import IGNORED

# -- windows to a batch -----------------------------------------------------------------------------------------------


def to_batch(windows: Sequence[SampleWindow], *, masks: bool = True, length: int | None = None, first_row: int = 0) -> Batch:
    """Return the batch of windows of equal length.

    `masks` keeps documents apart; without it a row is one document. `first_row` is the number of windows of the global batch
    before these, on other ranks: dropout differs by it.
    """
    ids = np.stack([window.ids for window in windows])
    count, whole = ids.shape[0], ids.shape[1] - 1
    row = whole if length is None else length
    if whole % row:
        raise UsageError(f"length: {row} does not divide the {whole} tokens of a sample")
    tokens, labels = ids[:, :-1], ids[:, 1:].copy()
    shape = (count * (whole // row), row)
    first = first_row * (whole // row)
    if masks:
        begins = np.zeros((count, whole + 1), bool)
        for i, window in enumerate(windows):
            begins[i, window.ends] = True
            labels[i, window.ends - 1] = IGNORED
        layout = _packed(begins[:, :whole].reshape(shape)).numbered(first)
    else:
        layout = TokenLayout.whole(*shape)
        layout = layout.numbered(first) if first else layout
    return Batch(torch.from_numpy(tokens.reshape(shape).copy()), torch.from_numpy(labels.reshape(shape)), layout)


def _packed(begins: np.ndarray) -> TokenLayout:
    """Return the layout of rows without padding; `begins` (rows, n) marks the first token of documents."""
    begins = begins.copy()
    begins[:, 0] = True
    place = np.arange(begins.shape[1])
    order = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    seg = np.cumsum(begins, axis=1) - 1
    known = Known(tuple((seg[:, -1] + 1).tolist()), begins.shape[1])
    return TokenLayout.of(torch.from_numpy(order), torch.from_numpy(seg), known=known)


@dc.dataclass(frozen=True)
class LengthWarmup:
    """Sequence-length warm-up: rows of `first` tokens, then twice as many, … up to the length of a sample.

    Each length below the last has an equal part of `tokens`, the tokens of the warm-up.       Li et al. 2021; Press et al. 2020
    """

    first: int
    tokens: int

    def lengths(self, length: int) -> list[int]:
        """Return the lengths of the warm-up, up to that of a sample."""
        lengths = [length]
        while lengths[0] > self.first and lengths[0] % 2 == 0:
            lengths.insert(0, lengths[0] // 2)
        if lengths[0] != self.first or self.tokens < 1:
            raise UsageError(f"warm-up: {length} is not {self.first} doubled some times, or {self.tokens} tokens are below 1")
        return lengths

    def __call__(self, seen: int, length: int) -> int:
        """Return the length of rows after `seen` tokens; `length` is that of a sample."""
        lengths = self.lengths(length)
        return lengths[min(seen * (len(lengths) - 1) // self.tokens, len(lengths) - 1)]


# -- the loader -------------------------------------------------------------------------------------------------------


AHEAD = 2  # batches that are read ahead per worker
STATE_KEYS = {"samples", "stream"}


class Loader:
    """`for batch in loader`: endless batches from `position`, which counts the samples of all ranks that were consumed."""

    def __init__(
        self,
        stream: Stream,
        *,
        batch: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        masks: bool = True,
        warmup: LengthWarmup | None = None,
    ) -> None:
        if not 0 <= rank < world <= batch:
            raise UsageError(f"batch: rank {rank} of {world} and a batch of {batch}; every rank needs at least one sample")
        self.stream, self.batch, self.rank, self.world = stream, batch, rank, world
        self.workers, self.masks, self.warmup = workers, masks, warmup
        self.position = 0
        if warmup is not None:
            warmup.lengths(stream.length)  # raises where they do not fit

    # -- state

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: plain data."""
        return {"samples": self.position, "stream": self.stream.fingerprint}

    def load_state(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Continue behind the samples of a state; one of another corpus, seed, length or mixture is refused unless `force`."""
        if set(state) != STATE_KEYS or type(state["samples"]) is not int or state["samples"] < 0:
            raise FileError(f"the state of the data is {str(dict(state))[:200]}; it must have {', '.join(sorted(STATE_KEYS))}")
        if state["stream"] != self.stream.fingerprint and not force:
            names = ", ".join(tokens.name for tokens in self.stream.sources)
            raise FileError(
                f"{names}: the data, or its weights, length or seed, differ from those of the run that is resumed; restore "
                "them, or continue with force=True: samples may then be repeated or left out"
            )
        self.position = state["samples"]

    # -- batches

    def batch_at(self, position: int) -> Batch:
        """Return this rank's part of the global batch that begins with a sample."""
        mine = rows_of_rank(self.batch, self.rank, self.world)
        length = self.stream.length
        rows = length if self.warmup is None else self.warmup(position * length, length)
        windows = self.stream.samples(position + mine.start, mine.stop - mine.start)
        return to_batch(windows, masks=self.masks, length=rows, first_row=mine.start)

    def __iter__(self) -> Iterator[Batch]:
        if not self.workers:
            while True:
                batch = self.batch_at(self.position)
                self.position += self.batch
                yield batch
        pool, ahead = ThreadPoolExecutor(self.workers), collections.deque[Future[Batch]]()
        try:
            first = self.position  # of the batches that were read ahead
            while True:
                if first != self.position:  # a state was loaded, or another iterator has taken some
                    for future in ahead:
                        future.cancel()
                    ahead.clear()
                    first = self.position
                while len(ahead) < AHEAD * self.workers:
                    ahead.append(pool.submit(self.batch_at, first + len(ahead) * self.batch))
                batch = ahead.popleft().result()
                self.position = first = first + self.batch
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def rows_of_rank(batch: int, rank: int, world: int) -> slice:
    """The rows of a batch that a rank has."""
    return slice(batch * rank // world, batch * (rank + 1) // world)


def evaluation(
    tokens: CorpusTokens, length: int, batch: int, *, most: int | None = None, masks: bool = True, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield the windows of a corpus in order, the same at every call; of more than `most` batches, evenly spaced ones.

    A rank takes every `world`-th window; the last batch may be smaller, and there may be none. Sum losses and labels over all.
    """
    length = min(length, tokens.tokens - 1)
    count = windows_of(tokens, length)
    wanted = count if most is None else min(count, most * batch)
    numbers = np.arange(wanted) * count // wanted
    mine = numbers[rank::world].tolist()
    for first in range(0, len(mine), batch):
        windows = [window(tokens, number * length, length) for number in mine[first : first + batch]]
        yield to_batch(windows, masks=masks)
