"""Law 18, loss: `model.loss` is the head's criterion on the outputs of `model()`, plus the losses that parts add.

    cross_entropy   mean over labels ≠ −100 of  log Σ_c e^(y_c) − y_label
    cosine          mean of  1 − y·t / (|y| |t|)
    mse             mean of  (y − t)²

The code of a training loss may differ from that of the outputs (the logits of a large vocabulary never exist as a whole), so a
soft-cap, a scale or a bias can be missing in one of them. The criteria are written out here again. Where labels are classes
per token, some are −100. The losses that parts add come from a second run, in evaluation mode; they are added only where the
caller gives a dict for them, or in training, and the dict is filled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.construction import generator
from dovetail.core.group import Criterion
from dovetail.proof.laws.case import Case, NotApplicable, law

IGNORED = -100


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of −log softmax(outputs)[label] over the labels that are not ignored."""
    outputs, labels = outputs.flatten(0, -2), labels.flatten()
    outputs, labels = outputs[labels != IGNORED], labels[labels != IGNORED]
    highest = outputs.amax(-1, keepdim=True)
    log_total = (outputs - highest).exp().sum(-1).log() + highest[:, 0]
    return (log_total - outputs[torch.arange(len(labels)), labels]).mean()


def cosine(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of one minus the cosine of each output and its label."""
    lengths = outputs.square().sum(-1).sqrt() * labels.square().sum(-1).sqrt()
    return (1 - (outputs * labels).sum(-1) / lengths).mean()


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean squared difference."""
    return (outputs - labels).square().mean()


CRITERIA: dict[Criterion, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy, "cosine": cosine, "mse": mse}


@law(18, "loss", "`model.loss` is the head's criterion on the outputs of `model()`, plus the losses that parts add")
@torch.no_grad()
def loss(case: Case) -> None:
    """Compare model.loss with the criterion on the outputs, where some labels are ignored, and a row has no label at all."""
    head = case.spec.head
    if head is None:
        raise NotApplicable("no head")
    added: dict[str, Tensor] = {}
    outputs = case.run()
    labels = head.labels(case.scope, tuple(outputs.shape[:-1]), generator(case.seed, "labels")).clone()
    if not head.pools() and not labels.is_floating_point():
        labels[:, ::3] = IGNORED
        labels[0] = IGNORED  # a row without any label
    case.run(losses=added, labels=labels)
    want = CRITERIA[head.criterion](outputs, labels) + sum(added.values(), torch.zeros(()))
    got = case.model.loss(case.inputs, labels, case.ctx(losses={}))
    case.same(got, want, f"model.loss and {head.criterion} of model() with {len(added)} added losses")
    bare = case.model.loss(case.inputs, labels, case.ctx())
    case.same(bare, CRITERIA[head.criterion](outputs, labels), "model.loss in evaluation, which adds no loss of a part")
    filled: dict[str, Tensor] = {}
    case.model.loss(case.inputs, labels, case.ctx(losses=filled, seed=1))
    case.true(set(filled) == set(added), f"in training the dict of losses has {sorted(filled)}, not {sorted(added)}")
