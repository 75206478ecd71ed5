"""Trial: a text on which models are evaluated, and trained for some minutes. `graft` compares a model with its changed self."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.base.termination import Interrupt
from dovetail.data.corpus import Batch, Corpus
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.loop import evaluate, train
from dovetail.training.metrics import StepMetrics
from dovetail.training.objective import Objective
from dovetail.training.plan import Plan
from dovetail.training.source import corpus_for
from dovetail.training.task import objective_kind, text_objective


@dc.dataclass(frozen=True)
class Trial:
    """A text to evaluate models on and to train them with."""

    corpus: Corpus
    held_out: list[Batch]
    tokenizer: Tokenizer
    batch: int
    length: int
    seed: int

    @staticmethod
    def open(
        specs: Sequence[Model], text: str | Path, tokenizer: Tokenizer | None, batch: int, length: int, seed: int
    ) -> Trial:
        """Read and tokenize the text, and check it against the specs."""
        for spec in specs:
            objective_kind(spec, "text")
        corpus = corpus_for(specs, text, tokenizer, length, "keep {size}, or leave --text out")
        assert tokenizer is not None  # the text was encoded
        return Trial(corpus, list(corpus.validation(batch, length)), tokenizer, batch, length, seed)

    def loss(self, model: Transformer) -> float:
        """Return the held-out loss in nats per token."""
        return evaluate(model, self.held_out, self._objective(model), self.seed)

    def heal(
        self, model: Transformer, plan: Plan, stop: Interrupt, show: Callable[[StepMetrics, float], None]
    ) -> list[StepMetrics]:
        """Train by the plan on the text that is not held out."""

        def batches(step: int) -> Batch:
            return self.corpus.batch(self.seed, step, self.batch, self.length)

        return train(model, batches, self._objective(model), plan, self.held_out, stop, show=show)

    def _objective(self, model: Transformer) -> Objective:
        return text_objective(model.part, self.tokenizer, self.length)
