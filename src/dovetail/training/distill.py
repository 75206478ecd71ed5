"""Distillation: a student learns the teacher's probs of every answer token, not the token alone.

    forward    Σᵥ q(v) (log q(v) − log p(v))         covers all that the teacher says                    Hinton et al. 2015
    reverse    Σᵥ p(v) (log p(v) − log q(v))         avoids what the teacher would not say               Gu et al. 2023

p: the student, q: the teacher, both of logits / temperature; a sum over the tokens of answers. Both have one vocabulary.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dovetail.core.errors import FileError, UsageError
from dovetail.core.loss import IGNORED, LossSum
from dovetail.data.corpus import Batch
from dovetail.model import ModelModule
from dovetail.training.objective import NOT_A_SETTING, Setup, context
from dovetail.training.source import Source
from dovetail.training.tuning import TuningObjective

CHUNK = 256  # tokens whose logits are in memory at one time


@dc.dataclass(frozen=True)
class Distill(TuningObjective):
    """Distillation from a teacher's directory."""

    name, task = "distill", "predicting the teacher's probabilities"

    teacher: str | None = None  # a model directory
    direction: Literal["forward", "reverse"] = "forward"
    temperature: float = 1.0
    model: Any = dc.field(default=None, metadata=NOT_A_SETTING)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(tokens,) the divergence of logits (tokens, vocab)."""
        p, q = (torch.log_softmax(one / self.temperature, -1) for one in (student, teacher))
        return ((q.exp() * (q - p)) if self.direction == "forward" else (p.exp() * (p - q))).sum(-1)

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        ctx, wanted = context(batch, seed, training), batch.labels != IGNORED
        x, inner = model.hidden(batch.tokens, ctx)
        with torch.no_grad():
            y, theirs = self.model.hidden(batch.tokens, context(batch, 0, False))
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for ours, teachers in zip(x[wanted].split(CHUNK), y[wanted].split(CHUNK), strict=True):
            with torch.no_grad():
                target = self.model.head(teachers, theirs)
            logits = model.head(ours, inner)
            total = total + self.divergence(logits.to(total.dtype), target.to(total.dtype)).sum()
        return LossSum(total + ctx.with_added(total.new_zeros(())) * wanted.sum(), wanted.sum())

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        if self.direction not in ("forward", "reverse"):
            raise UsageError(f"--direction: {self.direction!r} is neither forward nor reverse")
        if self.teacher is None:
            raise UsageError("--teacher: give the directory of the model to learn from")
        if self.temperature <= 0:
            raise UsageError(f"--temperature: {self.temperature} is not above 0; it divides the logits")
        if setup.ranks.count > 1:
            raise UsageError("distill: runs on one rank")
        teacher = setup.load(self.teacher).to(dtype=setup.model.dtype).requires_grad_(False)
        own = source.tokenizer
        if teacher.part.vocab != setup.model.part.vocab or (
            teacher.tokenizer is not None and own is not None and teacher.tokenizer.to_json() != own.to_json()
        ):
            raise FileError(f"{self.teacher}: its tokenizer or vocabulary is not the student's; token by token they must agree")
        return dc.replace(self, model=teacher), source
