"""SyntheticTask: a kind of rows of tokens with labels where an answer is due, drawn from a seed.

    batch = task.batch(seed, rows=64, length=128, vocab=256)      tokens, labels (64, 128): −100 where no answer is due

A label is the answer that the model gives after the token at its position. Where a task has several answers in a row, each
follows the tokens of those before it, so that a row whose most probable answers are all right is one that greedy decoding
answers without an error.

A task is one class with its fields, registered by `@register("name")` in a module that `read_synthetic_task` imports.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.data.corpus import Batch
from dovetail.disk.yaml import parse_yaml
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.spec.check import check
from dovetail.spec.part import Part, from_data


class BatchDraw(NamedTuple):
    """The sizes of a batch and its random numbers."""

    rows: int
    length: int
    vocab: int
    random: torch.Generator

    def uniform(self, count: int, low: int, high: int) -> Tensor:
        """(rows, count) independent integers, low ≤ … < high."""
        return torch.randint(low, high, (self.rows, count), generator=self.random)

    def distinct(self, count: int, low: int, high: int) -> Tensor:
        """(rows, count) distinct integers of each row in random order, low ≤ … < high."""
        return low + torch.rand(self.rows, high - low, generator=self.random).argsort(1)[:, :count]

    def ascending(self, count: int, low: int, high: int) -> Tensor:
        """(rows, count) distinct integers of each row in ascending order, low ≤ … < high."""
        return low + torch.rand(self.rows, high - low, generator=self.random).topk(count).indices.sort().values

    def unanswered(self) -> Tensor:
        """(rows, length) labels of which none is set."""
        return torch.full((self.rows, self.length), IGNORED)


@dc.dataclass(frozen=True, kw_only=True, repr=False)
class SyntheticTask(Part):
    """Tokens and labels as a function of a seed and of sizes."""

    group: ClassVar[str] = "task"

    def least_length(self) -> int:
        """The shortest row that holds the task."""
        raise NotImplementedError

    def least_vocab(self) -> int:
        """The smallest vocabulary that holds the task."""
        raise NotImplementedError

    def carried(self, length: int, vocab: int) -> tuple[int, int, int] | None:
        """What must pass a position of the row to be answered later: the tokens up to it, the number of independent uniform
        answers, and the choices of each. None where that is not known."""
        return None

    def draw(self, of: BatchDraw) -> tuple[Tensor, Tensor]:
        """Return tokens and labels (rows, length)."""
        raise NotImplementedError

    def check_sizes(self, length: int, vocab: int) -> None:
        """Raise SpecError unless rows of this length over this vocabulary hold the task."""
        for what, size, least, flag in (
            ("length", length, self.least_length(), "--length"),
            ("vocab", vocab, self.least_vocab(), "--set vocab="),
        ):
            if size < least:
                remedy = f"{flag}{'' if flag.endswith('=') else ' '}{least}, or change the task"
                raise SpecError(what, f"{size}; the task {self.to_data()} needs at least {least}", remedy)

    def batch(self, seed: int, rows: int, length: int, vocab: int) -> Batch:
        """Return a batch, a pure function of the seed and the sizes."""
        self.check_sizes(length, vocab)
        tokens, labels = self.draw(BatchDraw(rows, length, vocab, torch.Generator().manual_seed(seed)))
        return Batch(tokens, labels, TokenLayout.whole(rows, length))


def read_synthetic_task(task: SyntheticTask | str | Mapping[str, Any], path: str = "task") -> SyntheticTask:
    """Return the task that a name of a kind, a mapping or YAML of one means; raise SpecError for an unknown kind or field."""
    from dovetail.data.tasks import algorithms, context, recall  # noqa: F401  registers the kinds

    data = parse_yaml(task, path) if isinstance(task, str) and ":" in task else task  # {kind: mqar, pairs: 8}
    found = data if isinstance(data, SyntheticTask) else from_data(data, SyntheticTask, path)
    check(found)
    return found
