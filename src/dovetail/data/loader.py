"""Loader: the batches of one rank, read ahead by threads.

    global batch    samples p … p + batch − 1          rank r of w takes  p + ⌊batch·r/w⌋ … p + ⌊batch·(r + 1)/w⌋ − 1

The state is p, the number of samples that were consumed, and the fingerprint of the stream. World size, rank, workers and batch
are no part of it. What was read ahead and not consumed is read again after a resume.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from dovetail.core.errors import FileError, UsageError
from dovetail.data.corpus import Batch
from dovetail.data.packing import LengthWarmup, to_batch
from dovetail.data.stream import Stream, window, windows_of
from dovetail.data.tokens import Tokens

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
    tokens: Tokens, length: int, batch: int, *, most: int | None = None, masks: bool = True, rank: int = 0, world: int = 1
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
