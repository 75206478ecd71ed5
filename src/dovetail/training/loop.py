"""The one training loop. What is learned is passed in: an objective turns a batch into a loss.

    for step: batch(step) → objective → loss → backward → clip → AdamW(rate(step)) → routers rebalance

Weights that decay are those the spec says do. Everything random is drawn from (seed, step), so a run stopped by steps is the
same bit for bit every time.                                   Loshchilov & Hutter 2019 (AdamW); Pascanu et al. 2013 (clipping)
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

from dovetail.core.errors import Diverged
from dovetail.core.finite import nonfinite_weight
from dovetail.core.fold import optimizer_groups
from dovetail.core.group import RouterModule
from dovetail.core.module import tensor_at
from dovetail.core.undeclared import check_declared
from dovetail.datasets.corpus import Batch
from dovetail.io.model_dir import save
from dovetail.model import ModelModule
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.progress import Progress


@dc.dataclass(frozen=True)
class Point:
    """What is known after one step; plain data."""

    step: int  # counted from 1
    loss: float
    rate: float
    tokens: int  # seen so far
    seconds: float
    validation: float | None = None


def train(
    model: ModelModule,
    batches: Callable[[int], Batch],
    objective: Objective,
    plan: Plan,
    validation: Sequence[Batch] = (),
) -> list[Point]:
    """Train the model in place and return one point per step.

    Raises Diverged where a loss or a gradient norm is not finite (no weight changes in that step), and at each eval where a
    weight or the held-out loss is not finite: no such model is saved or returned.
    """
    check_declared(model, model.part)
    optimizer = adamw(model, plan)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    points: list[Point] = []
    tokens, start = 0, time.monotonic()
    with Progress(plan.quiet) as show:
        for step in itertools.count():
            done = plan.done(step, time.monotonic() - start)
            rate = plan.rate(step, done)
            batch = batches(step)
            optimizer.zero_grad()
            loss = objective(model, batch, _seed(plan.seed, step), True)
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, plan.clip)
            if not (loss.isfinite() and grad_norm.isfinite()):
                raise _diverged(model, step, f"the loss is {loss.item()}, the gradient norm {grad_norm.item()}")
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            rebalance(model)
            tokens += batch.count
            behind = plan.done(step + 1, time.monotonic() - start)
            looks = int(behind * plan.looks) > int(done * plan.looks) or behind >= 1
            held = evaluate(model, validation, objective, plan.seed) if looks and validation else None
            if looks and (nonfinite_weight(model, model.part) or not math.isfinite(held or 0.0)):
                raise _diverged(model, step, "the update overflowed" if held is None else f"the held-out loss is {held}")
            points.append(Point(step + 1, loss.item(), rate, tokens, time.monotonic() - start, held))
            show(points[-1], min(behind, 1.0))
            if looks and plan.out is not None:
                save(model, model.part, plan.out, plan.beside)
            if behind >= 1:
                return points
    raise AssertionError("a plan always ends")


def _diverged(model: ModelModule, step: int, problem: str) -> Diverged:
    weight = nonfinite_weight(model, model.part)
    cause = f"; {weight}" if weight else ""
    return Diverged(f"step {step + 1}: {problem}{cause}; lower the learning rate (--learning-rate)")


def adamw(model: ModelModule, plan: Plan) -> torch.optim.AdamW:
    """AdamW over every learned weight, each once; norms, biases and gates do not decay."""
    decays = {"decay": plan.decay, "no_decay": 0.0}
    groups = [
        {"params": [tensor_at(model, path) for path in paths], "weight_decay": decays[name]}
        for name, paths in optimizer_groups(model.part).items()
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.learning_rate, betas=plan.betas, fused=True)


def rebalance(model: ModelModule) -> None:
    """Let every router that balances its experts by itself do so."""
    for module in model.modules():
        if isinstance(module, RouterModule):
            module.rebalance()


@torch.no_grad()
def evaluate(model: ModelModule, batches: Sequence[Batch], objective: Objective, seed: int = 0) -> float:
    """The mean loss over batches, without dropout."""
    losses: list[float] = []
    for i, batch in enumerate(batches):
        losses.append(objective(model, batch, _seed(seed, i), False).item())
        for layout in (batch.layout, batch.source_layout):
            if layout is not None:  # the masks and rotary tables of held-out batches would stay alive until the next eval
                layout.memo.clear()
    return sum(losses) / len(losses)


def _seed(seed: int, step: int) -> int:
    """One seed a step, small enough for every draw there is."""
    return (seed * 1_000_003 + step) % 2**31
