"""Law 18, loss: `model.loss` is the head's criterion on the outputs of `model()`, plus the losses that parts add.

    cross_entropy   mean over labels ≠ −100 of  log Σ_c e^(y_c) − y_label
    cosine          mean of  1 − y·t / (|y| |t|)
    mse             mean of  (y − t)²

The code of a training loss may differ from that of the outputs (the logits of a large vocabulary never exist as a whole), so a
soft-cap, a scale or a bias can be missing in one of them. The criteria are written out here again. Where labels are classes
per token, some are −100. The losses that parts add come from a second run, in evaluation mode; they are added only where the
caller gives a dict for them, or in training, and the dict is filled.

Law 27, tuned: the log-probs that tuning compares are those of the model's outputs, over the answer tokens only.

    log π(y | x) = Σᵢ log softmax(model(x, y))[yᵢ]      over every token of the answer, its last one included, and no other

Written out here from the outputs of each example alone; tuning computes them from labels, in padded batches. Of these follow:
DPO with the initial weights as the model is log 2; swapped answers have the opposite margin; a batch is the sum of its pieces;
packed examples have the loss of each alone.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.model.construction import generator
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.groups import Criterion
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import Case, NotApplicable, law
from dovetail.text.conversation import Encoded
from dovetail.training import preference, tuning
from dovetail.training.objective import NextToken
from dovetail.training.preference import Dpo, reference_log_probs, scores
from dovetail.training.tuning import Sft

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
    case.run(losses=Losses(added), labels=labels)
    want = CRITERIA[head.criterion](outputs, labels) + sum(added.values(), torch.zeros(()))
    got = case.model.loss(case.inputs, labels, case.ctx(losses=Losses()))
    case.same(got, want, f"model.loss and {head.criterion} of model() with {len(added)} added losses")
    bare = case.model.loss(case.inputs, labels, case.ctx())
    case.same(bare, CRITERIA[head.criterion](outputs, labels), "model.loss in evaluation, which adds no loss of a part")
    filled: dict[str, Tensor] = {}
    case.model.loss(case.inputs, labels, case.ctx(losses=Losses(filled), draws=Draws(1)))
    case.true(set(filled) == set(added), f"in training the dict of losses has {sorted(filled)}, not {sorted(added)}")


LENGTHS = ((9, 4), (6, 2), (11, 5))  # tokens of an example, and of its answer
LONGEST = 24


@law(
    27,
    "tuned",
    "the log-probs that tuning compares are those of the outputs, over the answer tokens only",
    budget=1.0,
    excepted_with=("padded",),
)
@torch.no_grad()
def tuned(case: Case) -> None:
    """Compare scores of pairs with the outputs of each example alone."""
    try:
        NextToken.check(case.spec)
    except SpecError as error:
        raise NotApplicable(error.problem) from error
    if case.patches is not None:
        raise NotApplicable("rows of text have no patches")
    rows = case.inputs.numpy()
    first = [_example(rows[i], n, answer) for i, (n, answer) in enumerate(LENGTHS)]
    second = [_example(rows[i][::-1], n, answer) for i, (n, answer) in enumerate(reversed(LENGTHS))]
    batch = preference.two_sided(first, second, np.arange(len(first)), LONGEST)
    chosen, rejected, _ = scores(case.model, batch, 0, False)
    for name, found, examples in (("chosen", chosen, first), ("rejected", rejected, second)):
        case.same(found.policy, torch.stack([_alone(case, example) for example in examples]), f"log-probs of {name} answers")
        counts = torch.tensor([int(example.answer.sum()) for example in examples])
        case.true(torch.equal(found.tokens, counts), f"{name} answers have {counts.tolist()} tokens")
    start = dc.replace(batch, extra={**batch.extra, "reference": reference_log_probs(case.model, batch)})
    case.same(Dpo()(case.model, start, 0, False).mean(), torch.tensor(math.log(2), dtype=torch.float64), "DPO at its start")
    whole, pieces = Dpo()(case.model, batch, 0, False), [Dpo()(case.model, piece, 0, False) for piece in batch.pieces(2)]
    case.same(pieces[0].plus(pieces[1]).mean(), whole.mean(), "DPO of a batch and of its pieces")
    tokens, labels, layout = tuning.packed_batch([first[:2], first[2:]], LONGEST)
    packed = Sft()(case.model, dc.replace(batch, tokens=tokens, labels=labels, layout=layout), 0, False)
    case.same(-packed.sum, chosen.policy.sum(), "the loss of packed examples and of each alone")


def _example(ids: np.ndarray, n: int, answer: int) -> Encoded:
    return Encoded(ids[:n].copy(), np.arange(n) >= n - answer)


def _alone(case: Case, encoded: Encoded) -> Tensor:
    """log π of an example's answer, from the outputs of the model."""
    ids = torch.from_numpy(encoded.ids)
    outputs = torch.log_softmax(case.model(ids[None], Ctx(layout=TokenLayout.whole(1, len(ids))))[0], -1)
    answer = np.flatnonzero(encoded.answer)
    return torch.stack([outputs[i - 1, ids[i]] for i in answer]).sum()
