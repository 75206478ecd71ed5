"""Programs of a loader: batches are taken by several iterators, states saved and loaded in mid-iteration, runs resumed with
other workers. Each batch is the one that a fresh loader computes for that position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checks.programs.frame import Kind, Session, Step, wrong
from dovetail.data.corpora import CorpusTokens
from dovetail.data.corpus import Batch
from dovetail.data.loader import Loader
from dovetail.data.stream import Stream

TOKENS, DOCUMENT = 401, 7


class Counted(CorpusTokens):
    """Tokens 0, 1, 2, … in documents of equal lengths."""

    name, tokens, documents, fingerprint = "counted", TOKENS, TOKENS // DOCUMENT, "counted"

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return np.arange(start, stop)

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange((start // DOCUMENT + 1) * DOCUMENT, stop + 1, DOCUMENT)


@cache
def _stream(seed: int) -> Stream:
    return Stream(Counted(), 8, seed=seed)


class LoaderKind(Kind):
    """A loader of one rank."""

    name = "loader"

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        world = rng.choice([1, 1, 2, 3])
        setup = {"seed": rng.randrange(3), "batch": rng.randint(world, 6), "world": world, "rank": rng.randrange(world)}
        steps = list[Step]()
        for _ in range(rng.randint(3, 14)):
            call = rng.choices(["take", "iterate", "save", "load", "resume"], [12, 3, 4, 5, 3])[0]
            steps.append(
                {
                    "take": lambda: ("take", {"count": rng.randint(1, 4), "iterator": rng.randrange(3)}),
                    "resume": lambda: ("resume", {"workers": rng.randrange(3)}),
                }.get(call, lambda call=call: (call, {}))()
            )
        return {**setup, "workers": rng.randrange(3)}, steps

    def start(self, setup: Mapping[str, Any]) -> LoaderSession:
        return LoaderSession(setup)


class LoaderSession(Session):
    """A loader with several iterators, and the position that it must have."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.sizes = {name: setup[name] for name in ("batch", "world", "rank")}
        self.stream, self.position = _stream(setup["seed"]), 0
        self.saved: dict[str, Any] | None = None
        self._open(setup["workers"])

    def _open(self, workers: int) -> None:
        self.loader = Loader(self.stream, workers=workers, **self.sizes)
        self.iterators: list[Iterator[Batch]] = [iter(self.loader)]

    def do_take(self, count: int, iterator: int) -> None:
        for _ in range(count):
            got = next(self.iterators[iterator % len(self.iterators)])
            expected = Loader(self.stream, **self.sizes).batch_at(self.position)
            if not (torch.equal(got.tokens, expected.tokens) and torch.equal(got.labels, expected.labels)):
                wrong(f"the batch at sample {self.position} is another one")
            self.position += self.sizes["batch"]
            if self.loader.state()["samples"] != self.position:
                wrong(f"the state is at sample {self.loader.state()['samples']}, not {self.position}")

    def do_iterate(self) -> None:
        self.iterators.append(iter(self.loader))

    def do_save(self) -> None:
        self.saved = self.loader.state()

    def do_load(self) -> None:
        if self.saved is not None:
            self.loader.load_state(self.saved)
            self.position = self.saved["samples"]

    def do_resume(self, workers: int) -> None:
        """A new process goes on where the run was."""
        state = self.loader.state()
        self._open(workers)
        self.loader.load_state(state)
