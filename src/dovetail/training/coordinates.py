"""The coordinate check of µP: how much the first steps change activations, over widths.

    Δ(w) = rms(activation after `steps` − activation at first)        at width w, the same data and learning rate
    slope = d log₂ Δ / d log₂ w                                       0: flat, as µP has it; above 0: wider models change more

An activation is what a branch adds to the residual stream, or the logits. Under the standard parametrization AdamW's updates of
a matrix add up over its inputs, so that Δ grows with the width and the best learning rate falls.        Yang et al. 2022, § 5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from dovetail.data.corpus import Batch
from dovetail.look.tracer import trace
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.step import Trainer

FACTORS = (1, 2, 4, 8)  # of the spec's width
FLAT = 0.25  # the largest slope that counts as flat: a change by less than 1.7 over 8 times the width
PATTERNS = ("layers.*_add", "*logits")


class Coordinate(NamedTuple):
    """One activation: its change at each width, a mean over seeds, and the slope."""

    address: str
    changes: tuple[float, ...]
    slope: float


def coordinate_check(
    specs: Sequence[Model],
    batches: Callable[[int], Batch],
    objective: Objective,
    plan: Plan,
    seeds: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Coordinate]:
    """Train one spec at several widths for the plan's steps at its peak learning rate, and compare activations on the batch
    behind the last."""
    assert plan.steps is not None, "a coordinate check is counted in steps"
    found: dict[str, list[float]] = {}
    for i, spec in enumerate(specs):
        changes: dict[str, float] = {}
        for seed in range(seeds):
            for address, change in _changes(spec, batches, objective, plan, seed).items():
                changes[address] = changes.get(address, 0.0) + change / seeds
            progress(i * seeds + seed + 1, len(specs) * seeds)
        for address, change in changes.items():
            found.setdefault(address, []).append(change)
    widths = [spec.width for spec in specs]
    return [Coordinate(address, tuple(values), slope(widths, values)) for address, values in found.items()]


def _changes(spec: Model, batches: Callable[[int], Batch], objective: Objective, plan: Plan, seed: int) -> dict[str, float]:
    """Address -> root mean square of the change of an activation."""
    model = build(spec, seed=seed)
    trainer = Trainer(model, objective, plan)
    steps = plan.steps or 0
    probe = batches(steps).tokens.to(model.device)
    before = trace(model, probe, *PATTERNS)
    for step in range(steps):
        trainer.step(batches(step), step, plan.learning_rate)
    after = trace(model, probe, *PATTERNS)
    return {address: _rms(after[address] - before[address]) for address in before}


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def slope(widths: Sequence[int], changes: Sequence[float]) -> float:
    """The slope of log₂ change over log₂ width, by least squares; 0 where an activation never changes."""
    if min(changes) <= 0:
        return 0.0 if max(changes) <= 0 else math.inf
    xs, ys = [math.log2(width) for width in widths], [math.log2(change) for change in changes]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
