"""The training loop. The objective is an argument: it turns a batch into a loss.

    for step: batch(step) → Trainer.step at lr(step) → metrics; at evals the held-out loss; at checkpoints a commit

Every random number is drawn from (seed, step), so that two runs of equal steps are bit-equal, and so is a run that was killed
and resumed from a checkpoint.

Ctrl-C during a run: the step that runs is finished, so that weights and metrics belong together; a second Ctrl-C raises.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from dovetail.base.termination import delaying
from dovetail.data.corpus import Batch
from dovetail.model.model import ModelModule
from dovetail.nn.declared_tensors import check_declared, frozen_base
from dovetail.nn.host import read_floats
from dovetail.nn.linear import Dense
from dovetail.nn.loss import LossSum
from dovetail.nn.module import evaluating
from dovetail.training.metrics import Speed, StepMetrics
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.samples import Samples
from dovetail.training.step import Trainer, seed_of
from dovetail.weights.quantization.leaf import SAVED

LAST_EVAL = 3.0  # seconds of the held-out loss of a run that a signal ends
MEASUREMENTS = 20  # times that the pace of a run limited by minutes is measured


class Recorder(Protocol):
    """What keeps a run: it restores the last checkpoint, records every step, and takes checkpoints (training/run.py)."""

    def restore(self, trainer: Trainer) -> tuple[Plan, list[StepMetrics]]:
        """Put the run's last checkpoint into the trainer; return the run's plan and the metrics up to there."""
        ...

    def due(self) -> bool:
        """Whether this rank asks for a checkpoint after the current step."""
        ...

    def record(self, trainer: Trainer, plan: Plan, metrics: StepMetrics, due: bool, last: bool) -> None:
        """Record the metrics of a step; take a checkpoint where some rank asks for one, and after the last step."""
        ...


def train(
    model: ModelModule,
    batches: Callable[[int], Batch],
    objective: Objective,
    plan: Plan,
    validation: Sequence[Batch] = (),
    stop: Callable[[], bool] = lambda: False,
    recorder: Recorder | None = None,
    ranks: JobRanks | None = None,
    samples: Samples | None = None,
    where: Callable[[int], str] | None = None,
    speed: Speed | None = None,
    show: Callable[[StepMetrics, float], None] | None = None,
) -> list[StepMetrics]:
    """Train the model in place and return the metrics of each step. The run ends early, with an eval, after a step in which
    `stop()` is true on some rank. A `recorder` keeps the run, and resumes it; `samples` are generated at evals. With a moving
    average the model has it at the end. With several `ranks`, every one of them calls this with its shard of the model and its
    rows of each batch. `where` names the place of a step's batch in the data, for errors. With a `speed`, metrics have the
    model FLOPs utilization. `show` is called with the metrics of each step and the fraction of the run that is over.

    Raises Diverged where a loss or a gradient norm is not finite (no weight changes in that step), and at each eval where a
    weight or the held-out loss is not finite: no such model is saved or returned.
    """
    if ranks is None or ranks.layout.tensor == 1:  # else it was checked before its leaves were given local weights
        frozen = frozen_base(model)  # weights of fewer bits have no gradient
        check_declared(model, model.part, SAVED if frozen else (Dense,))
    trainer = Trainer(model, objective, plan, ranks, where)
    history: list[StepMetrics] = []
    status, stragglers = trainer.ranks.status, trainer.ranks.stragglers
    if recorder is not None:
        status.at("restore")
        plan, history = recorder.restore(trainer)
    first = len(history)
    if samples is not None:
        samples.restore(first)
    tokens, before = (history[-1].tokens, history[-1].seconds) if history else (0, 0.0)
    start = after_first = time.monotonic()
    pace = _Pace(plan, first, start, trainer.ranks)
    for step in itertools.count(first):
        if step and plan.done(step) >= 1:  # a run that was complete
            break
        lr, begin = plan.lr(step), time.monotonic()
        status.at("data", step + 1)
        stragglers.begin()
        batch = batches(step)
        found = trainer.step(batch, step, lr, lambda: (stop(), recorder is not None and recorder.due()))
        stopped, due = found.flags
        tokens, now = tokens + found.tokens, time.monotonic()
        mfu = None if speed is None else speed.mfu(found.tokens, now - begin)
        after_first = now if step == first else after_first
        plan = pace.plan(plan, step + 1, now - after_first)
        last = stopped or plan.done(step + 1) >= 1
        is_eval = int(plan.done(step + 1) * plan.evals) > int(plan.done(step) * plan.evals) or last
        if is_eval:
            status.at("eval", step + 1)
        with delaying() if stopped else nullcontext():  # the checkpoint of a run that a signal ends begins here
            held_out = _eval(trainer, validation, step, now + LAST_EVAL if stopped else None) if is_eval else {}
        figures = {"grad_norm": found.grad_norm, "mfu": mfu, "imbalance": stragglers.imbalance}
        metrics = StepMetrics(step + 1, found.loss, lr, tokens, before + now - start, **figures, train_metrics=batch.figures)
        if (slow := stragglers.changed(step + 1)) and trainer.ranks.first:
            warnings.warn(slow, stacklevel=2)
        if held_out:
            metrics = dc.replace(metrics, val_loss=held_out.pop("loss"), val_metrics=held_out)
        history.append(metrics)
        if show is not None:
            show(metrics, plan.done(step + 1))
        if samples is not None:
            samples.take(trainer, history)
        if recorder is not None:
            status.at("record", step + 1)
            recorder.record(trainer, plan, metrics, due, last)
        if last:
            break
    trainer.take_average()
    return history


class _Pace:
    """The number of steps of a run limited by minutes: set after its first steps, and lowered where later ones are slower."""

    def __init__(self, plan: Plan, first: int, start: float, ranks: JobRanks) -> None:
        self.end = None if plan.minutes is None else start + 60 * plan.minutes
        self.first, self.ranks = first, ranks
        self.last, self.at = first, start  # the step and the time of the last measurement

    def plan(self, plan: Plan, step: int, seconds: float) -> Plan:
        """Return the plan after a step, `seconds` after the first one of this process. All ranks call it, with the times of the
        first rank."""
        if self.end is None:
            return plan
        if plan.is_measured(step, self.first):
            plan = dc.replace(plan, minutes=None, steps=self.ranks.on_first_rank(lambda: plan.measured(step, seconds)))
        elif plan.minutes is not None or step - self.last < self._interval(plan):
            return plan
        else:
            now, end = time.monotonic(), self.end
            per_step = (now - self.at) / (step - self.last)
            steps = self.ranks.on_first_rank(lambda: plan.shortened(step, end - now, per_step))
            plan = plan if steps is None else dc.replace(plan, steps=steps)
        self.last, self.at = step, time.monotonic()
        return plan

    def _interval(self, plan: Plan) -> int:
        """Steps until the next measurement: as many as there were before the last one, since the first steps may have been
        much faster than those that follow; then a fraction of the run."""
        return max(1, min(self.last - self.first, ((plan.steps or 0) - self.first) // MEASUREMENTS))


def _eval(trainer: Trainer, validation: Sequence[Batch], step: int, until: float | None = None) -> dict[str, float]:
    """Return the held-out metrics; raise Diverged where the loss or a weight is not finite. There are no metrics where they are
    not measured by the time `until`."""
    with trainer.averaged(), trainer.computing():
        seed = trainer.plan.seed
        late = None if until is None else lambda: trainer.ranks.any(time.monotonic() > until)
        result = measure(trainer.model, validation, trainer.objective, seed, trainer.evaluate, late) if validation else {}
    loss = result.get("loss")
    if trainer.ranks.any(trainer.nonfinite() is not None or not math.isfinite(loss or 0.0)):
        raise trainer.diverged(step, "the update overflowed" if loss is None else f"the held-out loss is {loss}")
    return result


def evaluate(model: ModelModule, batches: Sequence[Batch], objective: Objective, seed: int = 0) -> float:
    """Return the mean loss over all labels of the batches, without dropout."""
    return measure(model, batches, objective, seed)["loss"]


@torch.no_grad()
def measure(
    model: ModelModule,
    batches: Sequence[Batch],
    objective: Objective,
    seed: int = 0,
    evaluate: Callable[[Batch, int], dict[str, LossSum]] | None = None,
    late: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Return the mean `loss` over all labels of the batches, without dropout, and the objective's other metrics by name. They
    are empty if `late()` is true before the last batch. On several ranks `evaluate`, of a batch and a seed, is that of the
    trainer; every rank has the same batches."""
    sums_of = evaluate or (lambda batch, seed: objective.evaluate(model, batch.to(model.device), seed))
    sums: dict[str, LossSum] = {}
    with evaluating(model):
        for i, batch in enumerate(batches):
            found = sums_of(batch, seed_of(seed, i))
            sums = {name: sums[name].plus(one) if name in sums else one for name, one in found.items()}
            for layout in (batch.layout, batch.source_layout):
                if layout is not None:  # the masks and rotary tables of held-out batches would stay alive until the next eval
                    layout.memo.clear()
            if late is not None and i + 1 < len(batches) and late():
                return {}
    means = dict(zip(sums, read_floats(*(one.mean() for one in sums.values())), strict=True))
    return {"loss": means["loss"], **objective.metrics(means)}
