"""The training loop. The objective is an argument: it turns a batch into a loss.

    for step: batch(step) → Trainer.step at lr(step) → metrics; at evals the held-out loss; at checkpoints a commit

Every random number is drawn from (seed, step), so that two runs of equal steps are bit-equal, and so is a run that was killed
and resumed from a checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dovetail.core.host import read_floats
from dovetail.core.loss import LossSum
from dovetail.core.undeclared import check_declared
from dovetail.datasets.corpus import Batch
from dovetail.model import ModelModule
from dovetail.training.metrics import StepMetrics
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.progress import Progress
from dovetail.training.ranks import Ranks
from dovetail.training.speed import Speed
from dovetail.training.step import Trainer, seed_of


class Recorder(Protocol):
    """What keeps a run: it restores the last checkpoint, records every step, and takes checkpoints (training/run.py)."""

    def restore(self, trainer: Trainer) -> tuple[Plan, list[StepMetrics]]:
        """Put the run's last checkpoint into the trainer; return the run's plan and the metrics up to there."""
        ...

    def record(self, trainer: Trainer, plan: Plan, metrics: StepMetrics, last: bool) -> None:
        """Record the metrics of a step, and take a checkpoint if one is due."""
        ...


def train(
    model: ModelModule,
    batches: Callable[[int], Batch],
    objective: Objective,
    plan: Plan,
    validation: Sequence[Batch] = (),
    stop: Callable[[], bool] = lambda: False,
    recorder: Recorder | None = None,
    ranks: Ranks | None = None,
    speed: Speed | None = None,
) -> list[StepMetrics]:
    """Train the model in place and return the metrics of each step. The run ends early, with an eval, once `stop()` is true
    after a step. A `recorder` keeps the run, and resumes it. With a moving average the model has it at the end. With several
    `ranks`, every one of them calls this with its shard of the model and its rows of each batch. With a `speed`, metrics
    have the model FLOPs utilization.

    Raises Diverged where a loss or a gradient norm is not finite (no weight changes in that step), and at each eval where a
    weight or the held-out loss is not finite: no such model is saved or returned.
    """
    check_declared(model, model.part)
    trainer = Trainer(model, objective, plan, ranks)
    history: list[StepMetrics] = []
    if recorder is not None:
        plan, history = recorder.restore(trainer)
    first = len(history)
    tokens, before = (history[-1].tokens, history[-1].seconds) if history else (0, 0.0)
    start = after_first = time.monotonic()
    with Progress(plan.quiet) as show:
        for step in itertools.count(first):
            if step and plan.done(step) >= 1:  # a run that was complete
                break
            lr, begin = plan.lr(step), time.monotonic()
            batch = batches(step)
            found = trainer.step(batch, step, lr)
            count = trainer.ranks.sum(batch.count)
            tokens, now = tokens + count, time.monotonic()
            mfu = None if speed is None else speed.mfu(count, now - begin)
            after_first = now if step == first else after_first
            plan = plan.measured(step + 1, now - after_first)
            last = trainer.ranks.any(stop()) or plan.done(step + 1) >= 1
            is_eval = int(plan.done(step + 1) * plan.evals) > int(plan.done(step) * plan.evals) or last
            val_loss = _eval(trainer, validation, step) if is_eval else None
            seconds = before + now - start
            history.append(StepMetrics(step + 1, found.loss, lr, tokens, seconds, val_loss, found.grad_norm, mfu))
            show(history[-1], plan.done(step + 1))
            if recorder is not None:
                recorder.record(trainer, plan, history[-1], last)
            if last:
                break
    trainer.take_average()
    return history


def _eval(trainer: Trainer, validation: Sequence[Batch], step: int) -> float | None:
    """Return the held-out loss; raise Diverged where it or a weight is not finite."""
    with trainer.averaged(), trainer.computing():
        loss = evaluate(trainer.model, validation, trainer.objective, trainer.plan.seed) if validation else None
    if trainer.ranks.any(trainer.nonfinite() is not None or not math.isfinite(loss or 0.0)):
        raise trainer.diverged(step, "the update overflowed" if loss is None else f"the held-out loss is {loss}")
    return loss


@torch.no_grad()
def evaluate(model: ModelModule, batches: Sequence[Batch], objective: Objective, seed: int = 0) -> float:
    """Return the mean loss over all labels of the batches, without dropout."""
    mode = model.training
    model.eval()
    losses: list[LossSum] = []
    for i, batch in enumerate(batches):
        losses.append(objective(model, batch.to(model.device), seed_of(seed, i), False))
        for layout in (batch.layout, batch.source_layout):
            if layout is not None:  # the masks and rotary tables of held-out batches would stay alive until the next eval
                layout.memo.clear()
    model.train(mode)
    (value,) = read_floats(functools.reduce(LossSum.plus, losses).mean())
    return value
