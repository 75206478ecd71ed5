"""Preference objectives: pairs of a chosen answer y₊ and a rejected one y₋, or single answers judged as good or bad.

    s(y) = log π(y | x) − log π₀(y | x)        π₀: the initial weights; a sum over the tokens of the answer, its end included

    dpo      −log σ(β (s(y₊) − s(y₋)))                                                          Rafailov et al. 2023
    ipo      (s(y₊)/|y₊| − s(y₋)/|y₋| − 1/(2β))²         per token, as its authors' code has it  Azar et al. 2023
    orpo     −mean log π(x, y₊) − β log σ(o(y₊) − o(y₋)),   o(y) = log p/(1 − p),  p = e^(mean log π(y | x));  needs no π₀
                                                                                                Hong et al. 2024
    kto      1 − σ(±β (s(y) − z)),   + for good answers,   z = max(0, mean s(y') over answers y' to other prompts)
                                                                                                Ethayarajh et al. 2024
    reward   −log σ(r(x, y₊) − r(x, y₋)),   r: a head with one number per document              Bradley & Terry 1952

log π₀ is computed once before the first step, by the model itself, and stored in the run directory (training/reference.py): no
second model stays in memory. A batch has the chosen answers as tokens and the rejected ones as source.

Shapes: tokens, labels (batch, n); source (batch, m); reference (batch, 2); losses (batch,). A pair counts as one label.
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.data.chats import read_judged, read_preferences
from dovetail.data.corpus import Batch
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import at_least_fp32
from dovetail.text.conversation import Encoded
from dovetail.training.objective import Setup, TuningData, run_side, run_sides, sides
from dovetail.training.reference import add_reference
from dovetail.training.source import BatchShape, Note, Rows, Source
from dovetail.training.tuning import TuningObjective, TuningRows, packed_batch


class Scores(NamedTuple):
    """Of one answer per row, each (batch,): its log-prob by the model and by the initial weights, and its number of tokens."""

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """log π(y | x) − log π₀(y | x)."""
        return self.policy - self.reference


def scores(model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Scores, Scores, Tensor]:
    """The scores of both answers of each row, and the mean of the losses that parts add to the two passes."""
    both = sides(batch)
    log_probs, added = run_sides(batch, both, seed, training, model.log_probs)
    policy = torch.stack([log_prob.sum(-1) for log_prob in log_probs])
    reference = batch.extra["reference"].T.to(policy.dtype) if "reference" in batch.extra else torch.zeros_like(policy)
    chosen, rejected = (Scores(policy[i], reference[i], (side.labels != IGNORED).sum(-1)) for i, side in enumerate(both))
    return chosen, rejected, added


class PairLosses(NamedTuple):
    """Of a batch of rows: the loss of each (batch,), by how much its answer is preferred, and what parts add."""

    losses: Tensor
    margins: Tensor
    added: Tensor

    def summed(self) -> LossSum:
        """The loss over all rows."""
        count = len(self.losses)
        return LossSum(self.losses.sum() + self.added * count, torch.tensor(count, device=self.losses.device))


class RowObjective(TuningObjective):
    """An objective whose loss is a sum over rows of two answers each."""

    packs: ClassVar[bool] = False
    tuning_rate: ClassVar[float] = 1e-6  # a pair moves the weights far: the papers have 5e-7 to 5e-6
    needs_reference: ClassVar[bool] = True  # the log-probs of the initial weights
    margin: ClassVar[bool] = True  # whether `evaluate` also measures by how much answers are preferred

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        if self.needs_reference:
            add_reference(source, setup, reference_log_probs)
        return self, source

    def pair_losses(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> PairLosses:
        """The losses and margins of a batch."""
        raise NotImplementedError

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        return self.pair_losses(model, batch, seed, training).summed()

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        found = self.pair_losses(model, batch, seed, False)
        loss, margins = found.summed(), found.margins
        hits = (margins > 0).to(margins.dtype).sum()
        sums = {"loss": loss, "accuracy": LossSum(hits, loss.num_labels)}
        return {**sums, "margin": LossSum(margins.sum(), loss.num_labels)} if self.margin else sums


def reference_log_probs(model: ModelModule, batch: Batch) -> Tensor:
    """(batch, 2) log π₀ of both answers of each row."""
    both, _ = run_sides(batch, sides(batch), 0, False, model.log_probs)
    return torch.stack([one.sum(-1) for one in both], -1)


class Pairs(RowObjective):
    """An objective on pairs."""

    @classmethod
    def read(cls, path: Path, spec: Model, shape: BatchShape, note: Note, data: TuningData) -> Source:
        rows = TuningRows(path, *read_preferences(path), spec, shape, note, data)
        chosen, rejected = ([pair[i] for pair in rows.encoded] for i in range(2))
        return rows.source(lambda some: two_sided(chosen, rejected, some, shape.length), *rows.parts)


@dc.dataclass(frozen=True)
class Preference(Pairs):
    """An objective on pairs that compares with the initial weights."""

    beta: float = 0.1

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        """(batch,) the loss of each pair."""
        raise NotImplementedError

    def margins(self, chosen: Scores, rejected: Scores) -> Tensor:
        """(batch,) β (s(y₊) − s(y₋))."""
        return self.beta * (chosen.ratio - rejected.ratio)

    def pair_losses(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> PairLosses:
        chosen, rejected, added = scores(model, batch, seed, training)
        return PairLosses(self.losses(chosen, rejected), self.margins(chosen, rejected), added)


@dc.dataclass(frozen=True)
class Dpo(Preference):
    """Direct preference optimization."""

    name, task = "dpo", "preferring the chosen answer"

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        return -F.logsigmoid(self.margins(chosen, rejected))


@dc.dataclass(frozen=True)
class Ipo(Preference):
    """Identity preference optimization: the margin per token is to be 1/(2β), not as large as possible."""

    name, task = "ipo", "preferring the chosen answer by a margin"

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        per_token = [one.ratio / one.tokens.clamp_min(1) for one in (chosen, rejected)]
        return (per_token[0] - per_token[1] - 1 / (2 * self.beta)).square()


@dc.dataclass(frozen=True)
class Orpo(Preference):
    """Odds ratio preference optimization: the loss of the chosen text, prompt included, and of the odds of both answers."""

    name, task = "orpo", "predicting the chosen answer rather than the rejected one"
    tuning_rate: ClassVar[float] = 8e-6
    needs_reference: ClassVar[bool] = False

    def pair_losses(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> PairLosses:
        first, second = sides(batch)
        whole = first._replace(labels=first.layout.next_of(first.tokens, IGNORED))  # the chosen text, prompt included
        per_token, added = run_sides(batch, (whole, second), seed, training, model.log_probs)
        answers = [side.labels != IGNORED for side in (first, second)]
        policies = [one.masked_fill(~answer, 0).sum(-1) for one, answer in zip(per_token, answers, strict=True)]
        chosen, rejected = (
            Scores(policy, torch.zeros_like(policy), answer.sum(-1)) for policy, answer in zip(policies, answers, strict=True)
        )
        text = per_token[0].sum(-1) / (whole.labels != IGNORED).sum(-1).clamp_min(1)
        return PairLosses(self.losses(chosen, rejected) - text, self.margins(chosen, rejected), added)

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        return -self.beta * F.logsigmoid(self.margins(chosen, rejected))

    def margins(self, chosen: Scores, rejected: Scores) -> Tensor:
        return log_odds(chosen) - log_odds(rejected)


def log_odds(one: Scores) -> Tensor:
    """(batch,) log p/(1 − p) of the geometric mean p of an answer's token probs."""
    mean = one.policy / one.tokens.clamp_min(1)
    return mean - log1mexp(mean)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) of x < 0: by expm1 near 0, by log1p far from it (Mächler 2012). 0 itself is taken as −eps."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    near = x > -0.6931472
    by_expm1, by_log1p = torch.log(-torch.expm1(x.masked_fill(~near, -1.0))), torch.log1p(-torch.exp(x.masked_fill(near, -1.0)))
    return torch.where(near, by_expm1, by_log1p)


@dc.dataclass(frozen=True)
class Kto(RowObjective):
    """Kahneman–Tversky optimization: answers judged one by one. z is a mean over the batch, so it is computed whole."""

    name, task = "kto", "raising good answers and lowering bad ones"
    by_row: ClassVar[bool] = False
    margin: ClassVar[bool] = False

    beta: float = 0.1
    desirable: float = 1.0  # weight of the losses of good answers
    undesirable: float = 1.0

    def pair_losses(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> PairLosses:
        """The losses of a batch, and as margins s(y) − z with the sign of the judgment."""
        own, other = sides(batch)
        log_probs, added = run_side(batch, own, seed, training, model.log_probs)
        with torch.no_grad():
            others, _ = run_side(batch, other, seed, training, model.log_probs)
        policy, reference = log_probs.sum(-1), batch.extra["reference"].to(log_probs.dtype)
        own_scores = Scores(policy, reference[:, 0], (own.labels != IGNORED).sum(-1))
        return PairLosses(*self.losses(own_scores, others.sum(-1) - reference[:, 1], batch.extra["good"]), added)

    def losses(self, own: Scores, others: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        """(batch,) the losses, and s(y) − z with the sign of the judgment; `others` (batch,) are s(y') to other prompts."""
        offset = others.mean().clamp_min(0)
        gains = (own.ratio - offset) * torch.where(good, 1.0, -1.0).to(own.policy.dtype)
        weights = torch.where(good, self.desirable, self.undesirable).to(own.policy.dtype)
        return weights * (1 - torch.sigmoid(self.beta * gains)), gains

    @classmethod
    def read(cls, path: Path, spec: Model, shape: BatchShape, note: Note, data: TuningData) -> Source:
        rows = TuningRows(path, *read_judged(path), spec, shape, note, data)
        own = [one for (one,) in rows.encoded]
        if len(own) < 2:
            raise FileError(f"{path}: has one row; kto compares each answer with those to other prompts")
        # the answer of the next row to the prompt of each: fixed, so that its reference log-prob is, too
        other = [_answered(one, own[(i + 1) % len(own)], shape.length) for i, one in enumerate(own)]
        good = torch.tensor([row.fields["label"] for row in rows.rows])

        def make(some: Rows) -> Batch:
            batch = two_sided(own, other, some, shape.length)
            return dc.replace(batch, extra={**batch.extra, "good": good[some]})

        return rows.source(make, *rows.parts)


class RewardModel(Pairs):
    """A reward model by the Bradley–Terry model of pairs; its head replaces that of the language model."""

    name, task = "reward", "scoring the chosen answer above the rejected one"
    needs_reference: ClassVar[bool] = False
    fresh: ClassVar[str | None] = "head"
    tuning_rate: ClassVar[float] = 1e-5

    def pair_losses(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> PairLosses:
        def reward(tokens: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
            value = model(tokens, ctx)[:, 0]
            return value.to(at_least_fp32(value.dtype))

        (chosen, rejected), added = run_sides(batch, sides(batch), seed, training, reward)
        margins = chosen - rejected
        return PairLosses(-F.logsigmoid(margins), margins, added)

    @classmethod
    def spec_for(cls, spec: Model) -> Model:
        return spec if spec.head is not None and spec.head.criterion == "mse" else spec.set("head", {"kind": "reward"})

    @classmethod
    def check(cls, spec: Model) -> None:
        if spec.head is None or not spec.head.pools() or spec.head.criterion != "mse":
            raise SpecError("head", "a reward is one number per document", "--set head=reward")


def two_sided(first: list[Encoded], second: list[Encoded], rows: Rows, length: int) -> Batch:
    """The batch of some rows of two lists of examples: tokens and source, padded."""
    tokens, labels, layout = packed_batch([[first[i]] for i in rows], length)
    source, source_labels, source_layout = packed_batch([[second[i]] for i in rows], length)
    numbered = source_layout.numbered(len(rows))  # dropout differs between the two answers
    return Batch(tokens, labels, layout, source, numbered, {"source_labels": source_labels})


def _answered(encoded: Encoded, other: Encoded, length: int) -> Encoded:
    """The prompt of one example with the first answer and what follows it of another, cut to `length` tokens."""
    start, stop = int(encoded.answer.argmax()), int(other.answer.argmax())
    ids = np.concatenate([encoded.ids[:start], other.ids[stop:]])[:length]
    return Encoded(ids, np.concatenate([encoded.answer[:start], other.answer[stop:]])[:length])
