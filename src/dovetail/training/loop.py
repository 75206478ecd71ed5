"""The training loop. The objective is an argument: it turns a batch into a loss.

    for step: batch(step) → objective → loss → backward → clip → AdamW(lr(step)) → routers rebalance

Weight decay follows the groups that the spec declares. Every random number is drawn from (seed, step), so a run that is limited
by steps is bit-equal every time.                       Loshchilov & Hutter 2019 (AdamW); Pascanu et al. 2013 (clipping)
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

from dovetail.core.errors import Diverged
from dovetail.core.finite import nonfinite_weight
from dovetail.core.fold import optimizer_groups
from dovetail.core.group import RouterModule
from dovetail.core.host import read_floats
from dovetail.core.loss import LossSum
from dovetail.core.module import tensor_at
from dovetail.core.undeclared import check_declared
from dovetail.datasets.corpus import Batch
from dovetail.io.model_dir import check_replaceable, save
from dovetail.model import ModelModule
from dovetail.training.metrics import StepMetrics
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.progress import Progress

FUSED = ("cpu", "cuda", "mps", "xpu")  # devices with a fused AdamW


def train(
    model: ModelModule,
    batches: Callable[[int], Batch],
    objective: Objective,
    plan: Plan,
    validation: Sequence[Batch] = (),
    stop: Callable[[], bool] = lambda: False,
) -> list[StepMetrics]:
    """Train the model in place and return the metrics of each step. The run ends early, with an eval, once `stop()` is true
    after a step.

    Raises Diverged where a loss or a gradient norm is not finite (no weight changes in that step), and at each eval where a
    weight or the held-out loss is not finite: no such model is saved or returned.
    """
    check_declared(model, model.part)
    if plan.out is not None:
        check_replaceable(plan.out, plan.beside)  # refused now, not at the first save
    optimizer = adamw(model, plan)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    history: list[StepMetrics] = []
    tokens, start = 0, time.monotonic()
    with Progress(plan.quiet) as show:
        for step in itertools.count():
            done = plan.fraction_done(step, time.monotonic() - start)
            lr = plan.lr(step, done)
            batch = batches(step)
            optimizer.zero_grad()
            loss = objective(model, batch.to(model.device), _seed(plan.seed, step), True).mean()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(weights, plan.clip)
            value, norm = read_floats(loss, grad_norm)  # the one time that a step waits for its device
            if not (math.isfinite(value) and math.isfinite(norm)):
                raise _diverged(model, step, f"the loss is {value}, the gradient norm {norm}")
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            rebalance(model)
            tokens += batch.count
            done_after = plan.fraction_done(step + 1, time.monotonic() - start)
            last = done_after >= 1 or stop()
            is_eval = int(done_after * plan.evals) > int(done * plan.evals) or last
            val_loss = evaluate(model, validation, objective, plan.seed) if is_eval and validation else None
            if is_eval and (nonfinite_weight(model, model.part) or not math.isfinite(val_loss or 0.0)):
                raise _diverged(
                    model, step, "the update overflowed" if val_loss is None else f"the held-out loss is {val_loss}"
                )
            history.append(StepMetrics(step + 1, value, lr, tokens, time.monotonic() - start, val_loss))
            show(history[-1], min(done_after, 1.0))
            if is_eval and plan.out is not None:
                save(model, model.part, plan.out, plan.beside, keep_foreign=True)
            if last:
                return history
    raise AssertionError("a plan always ends")


def _diverged(model: ModelModule, step: int, problem: str) -> Diverged:
    weight = nonfinite_weight(model, model.part)
    cause = f"; {weight}" if weight else ""
    return Diverged(f"step {step + 1}: {problem}{cause}; lower the learning rate (--learning-rate)")


def adamw(model: ModelModule, plan: Plan) -> torch.optim.AdamW:
    """Return AdamW over every learned weight, each once; norms, biases and gates do not decay."""
    decays = {"decay": plan.weight_decay, "no_decay": 0.0}
    groups = [
        {"params": [tensor_at(model, path) for path in paths], "weight_decay": decays[name]}
        for name, paths in optimizer_groups(model.part).items()
    ]
    fused = model.device.type in FUSED
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.learning_rate, betas=plan.betas, fused=fused)


def rebalance(model: ModelModule) -> None:
    """Update the balancing bias of every router that has one."""
    for module in model.modules():
        if isinstance(module, RouterModule):
            module.rebalance()


@torch.no_grad()
def evaluate(model: ModelModule, batches: Sequence[Batch], objective: Objective, seed: int = 0) -> float:
    """Return the mean loss over all labels of the batches, without dropout."""
    mode = model.training
    model.eval()
    losses: list[LossSum] = []
    for i, batch in enumerate(batches):
        losses.append(objective(model, batch.to(model.device), _seed(seed, i), False))
        for layout in (batch.layout, batch.source_layout):
            if layout is not None:  # the masks and rotary tables of held-out batches would stay alive until the next eval
                layout.memo.clear()
    model.train(mode)
    (value,) = read_floats(functools.reduce(LossSum.plus, losses).mean())
    return value


def _seed(seed: int, step: int) -> int:
    """Return the seed of a step; below 2³¹, which every generator takes."""
    return (seed * 1_000_003 + step) % 2**31
