"""What a training run did, from what its directory records: spikes, and what its checkpoints show.

    spike at step t      loss_t > median + 8 · 1.48 · MAD of the 50 steps before; the gradient norm likewise
    update ratio         ‖W_t − W_s‖ / (‖W_s‖ · (t − s)) of two checkpoints: the update of a step over the weights
    row entropy          Σ p log 1/p / log(visible keys), the mean of all heads                        Zhai et al. 2023
    router balance       tokens of the busiest expert over the mean, of the least balanced router
    induction            the largest mass of a head on repeated random tokens (`look/relations.py`)    Olsson et al. 2022

Activations are those of random tokens, so that two checkpoints, and two runs, can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.look.relations import FEWEST, head_traits
from dovetail.look.states import entropies
from dovetail.look.tracer import trace
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import taps
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints, step_of
from dovetail.training.export import checkpoint_pieces
from dovetail.training.metrics import StepMetrics

BEFORE, FACTOR, FEWEST_STEPS = 50, 8 * 1.4826, 20
ROWS, LENGTH = 8, 64  # of random tokens


class Spike(NamedTuple):
    """A step whose loss or gradient norm is far above that of the steps before."""

    step: int
    what: str
    value: float
    usual: float  # the median of the steps before
    tokens: int  # trained on after the step


class CheckpointState(NamedTuple):
    """What a checkpoint shows; None where the model, or the first checkpoint, has no such figure."""

    step: int
    update: float | None
    entropy: float | None
    balance: float | None
    induction: float | None
    head: str  # of the induction


def spikes(history: Sequence[StepMetrics]) -> list[Spike]:
    """The spikes of the loss and of the gradient norm, in the order of steps."""
    found: list[Spike] = []
    for what, values in (("loss", [m.loss for m in history]), ("gradient norm", [m.grad_norm for m in history])):
        for i in range(FEWEST_STEPS, len(history)):
            usual = [value for value in values[max(0, i - BEFORE) : i] if value is not None and math.isfinite(value)]
            value = values[i]
            if value is None or len(usual) < FEWEST_STEPS:
                continue
            middle = median(usual)
            if not value <= middle + FACTOR * max(median(abs(x - middle) for x in usual), 1e-3 * abs(middle)):
                found.append(Spike(history[i].step, what, value, middle, history[i].tokens))
    return sorted(found)


@torch.no_grad()
def checkpoint_states(place: Path, spec: Model, progress: Callable[[int, int], None] | None = None) -> list[CheckpointState]:
    """What each checkpoint of a run shows, oldest first."""
    paths, states = Checkpoints(place / CHECKPOINTS).complete(), list[CheckpointState]()
    model, before, last = build(spec), dict[str, Tensor](), 0
    for i, path in enumerate(paths):
        weights = {name: tensor for piece in checkpoint_pieces(path, spec) for name, tensor in piece.make().items()}
        for name, tensor in weights.items():
            tensor_at(model, name).copy_(tensor)
        step, update = step_of(path), None
        if before:
            change, size = (
                math.sqrt(sum(float(x.double().square().sum()) for x in each))
                for each in ((weights[name] - before[name] for name in before), before.values())
            )
            update = change / max(size, 1e-30) / (step - last)
        states.append(CheckpointState(step, update, *_activations(model)))
        before, last = weights, step
        if progress is not None:
            progress(i + 1, len(paths))
    return states


def _activations(model: ModelModule) -> tuple[float | None, float | None, float | None, str]:
    """Row entropy, router balance and induction on random tokens."""
    spec, axes = model.part, taps(model.part)
    patterns = [a for a, each in axes.items() if each == "head query key" and a.startswith("layers.")]
    routers = [a for a in axes if fnmatchcase(a, "layers.*.router.chosen")]
    if not spec.embed.token_ids or spec.encoder is not None or not (patterns or routers):
        return None, None, None, ""
    ids = torch.randint(spec.vocab, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    again, relations = head_traits(ids, spec.order() == "causal", {}, 0)
    run = trace(model, again, *patterns, *routers)
    entropy = [float(entropies(run[a], FEWEST).mean()) for a in patterns]
    balance = list[float]()
    for address in routers:
        logits = address.removesuffix("chosen") + "logits"
        experts = trace(model, again[:1], logits)[logits].shape[-1]
        counts = torch.bincount(run[address].flatten().long(), minlength=experts).double()
        balance.append(float(counts.max() / counts.mean()))
    best, head = -1.0, ""
    for address in patterns if "induction" in relations else ():
        mass = relations["induction"].relation.mass(run[address].float())
        if float(mass.max()) > best:
            best, head = float(mass.max()), f"{address}[head={int(mass.argmax())}]"
    return sum(entropy) / len(entropy) if entropy else None, max(balance, default=None), best if head else None, head
