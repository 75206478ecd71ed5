"""Answers: the objective of synthetic tasks (data/tasks). The loss is of the answers only; nothing else is predicted.

    accuracy       the fraction of answers that are the most probable token
    exact_match    the fraction of rows whose answers are all right: what greedy decoding answers without an error

Every batch is new: the rows of a step are a pure function of (seed, step). Those held out are the same for every seed, and are
drawn from seeds that no step has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.data.corpus import Batch
from dovetail.data.tasks.task import SyntheticTask
from dovetail.disk.shape import data_sha256
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.spec.part import plain
from dovetail.training.objective import Labeled, NextToken, context, with_accuracy
from dovetail.training.source import BatchShape, Source

HELD_OUT_ROWS = 512
HELD_OUT_SEED = 2**62  # the first seed of held-out batches; those of steps are below


class Answers(Labeled):
    """−log p(answer | the tokens up to its position)."""

    name, task, reads = "answers", "answering a synthetic task", "task"

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        return batch.tokens, batch.labels, context(batch, seed, training)

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        loss, answers = model.loss_and_answers(*self.arguments(model, batch, seed, False))
        right = answers == batch.labels
        rows = (right | (batch.labels == IGNORED)).all(1)
        exact = LossSum(rows.sum().float(), torch.full((), float(len(rows)), device=rows.device))
        return {**with_accuracy((loss, right.sum())), "exact_match": exact}

    @classmethod
    def check(cls, spec: Model) -> None:
        NextToken.check(spec)  # earlier answers stand among the tokens after them


def from_task(task: SyntheticTask, spec: Model, shape: BatchShape) -> Source:
    """Draw rows of `shape.length` tokens over the vocabulary of the spec."""
    task.check_sizes(shape.length, spec.vocab)

    def drawn(seed: int, rows: int) -> Batch:
        return task.batch(seed, rows, shape.length, spec.vocab)

    def batch(step: int) -> Batch:
        whole = drawn((shape.seed * 1_000_003 + step) % HELD_OUT_SEED, shape.batch)
        return whole if shape.ranks == 1 else whole.some_rows(shape.rows())

    counts = [min(shape.batch, HELD_OUT_ROWS - i) for i in range(0, HELD_OUT_ROWS, shape.batch)]
    data = {"task": plain(task)}
    return Source(
        batch,
        [drawn(HELD_OUT_SEED + i, count) for i, count in enumerate(counts)],
        None,
        task.kind,
        data,
        data_sha256({**data, "length": shape.length, "vocab": spec.vocab}),
        0,
        HELD_OUT_ROWS,
        lambda step: f"of step {step + 1} of the task {task.kind}",
        unit="rows",
    )
