"""Objectives: functions from a model and a batch to a loss, passed to the training loop.

    next_token     −log p(xᵢ₊₁ | x₁ … xᵢ)                                    causal models
    MaskedTokens   −log p(xᵢ | the text with some tokens masked)             bidirectional models (Devlin et al. 2018)
    seq2seq        −log p(yᵢ₊₁ | y₁ … yᵢ, source)                            encoder–decoders
    classify       −log p(class | x)                                         heads with one output per row

Shapes: tokens, labels (batch, n); source (batch, m); classes (batch,). Padding never counts in a loss.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Protocol

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.fold import over_vocab
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import IGNORED, LossSum
from dovetail.core.random import draw, streams, words
from dovetail.datasets.corpus import Batch
from dovetail.model import Model, ModelModule
from dovetail.text.tokenizer import MASK, Tokenizer

STREAMS = ("masked tokens", "random tokens")


class Objective(Protocol):
    """(model, batch, seed, training) -> LossSum. Every random number comes from `seed`; dropout is applied in training only."""

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        """Return the loss of the batch summed over its labels, and their number."""
        ...


def _ctx(batch: Batch, seed: int, training: bool) -> Ctx:
    # auxiliary losses (balance of experts) are part of training; held-out data is measured by the objective alone
    return Ctx(layout=batch.layout, seed=seed if training else None, losses={} if training else None)


def _without_padding(labels: Tensor, batch: Batch) -> Tensor:
    return labels.masked_fill(~batch.layout.real, IGNORED)


def next_token(model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
    """Return the loss of predicting labels (batch, n): the tokens shifted by one."""
    return model.loss_sum(batch.tokens, _without_padding(batch.labels, batch), _ctx(batch, seed, training))


def classify(model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
    """Return the loss of predicting labels (batch,): one class per row."""
    return model.loss_sum(batch.tokens, batch.labels, _ctx(batch, seed, training))


def seq2seq(model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
    """Return the loss of predicting the target. Tokens are the target behind its start token; the source is encoded first."""
    assert batch.source is not None, "a seq2seq batch has a source"
    assert batch.source_layout is not None, "a seq2seq batch has the layout of its source"
    ctx = _ctx(batch, seed, training)
    encoder_output, encoder_layout = model.encode(batch.source, dc.replace(ctx, layout=batch.source_layout))
    ctx = dc.replace(ctx, encoder_output=encoder_output, encoder_layout=encoder_layout)
    return model.loss_sum(batch.tokens, _without_padding(batch.labels, batch), ctx)


@dc.dataclass(frozen=True)
class MaskedTokens:
    """Masked language modeling. A fraction of the tokens is predicted; of these most are replaced by the mask, some by random
    tokens, and some stay, so that the model learns from tokens that it sees, too."""

    mask: int  # the id of the mask token
    vocab: int  # random tokens are drawn from 0 … vocab − 1
    fraction: float = 0.15  # of all tokens that are predicted
    masked: float = 0.8  # of those: replaced by the mask
    replaced: float = 0.1  # of those: replaced by a random token

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        """Return the loss on the chosen tokens; the labels of the batch are not used."""
        tokens, labels = self.corrupt(batch.tokens, batch.layout, seed)
        return model.loss_sum(tokens, labels, _ctx(batch, seed, training))

    def corrupt(self, tokens: Tensor, layout: TokenLayout, seed: int) -> tuple[Tensor, Tensor]:
        """Return the input of the model (batch, n) and its labels (batch, n): −100 where a token is not predicted."""
        bits, other = (draw(s, layout.sample, layout.order) for s in streams(torch.tensor(seed), STREAMS))
        first, choice = (word * 2.0**-32 for word in words(bits))
        chosen, random = (first < self.fraction) & layout.real, words(other)[0] % self.vocab
        inputs = torch.where(chosen & (choice < self.masked), self.mask, tokens)
        replaced = chosen & (choice >= self.masked) & (choice < self.masked + self.replaced)
        inputs = torch.where(replaced, random, inputs)
        return inputs, tokens.masked_fill(~chosen, IGNORED)


def check_learns_text(spec: Model) -> None:
    """Raise SpecError unless the spec can be trained on plain text."""
    tokens = over_vocab(spec)
    if spec.encoder is not None:
        raise SpecError("encoder", "plain text has no sources and targets", "use dovetail.training.objective.seq2seq in Python")
    if "embed" not in tokens:
        raise SpecError("embed", f"{spec.embed.kind} does not read tokens", "--set embed=tokens")
    if "head" not in tokens:
        raise SpecError("head", "training on text needs logits over the vocabulary at every position", "--set head=lm")
    if spec.order() == "ahead":
        raise SpecError("layers", "a prefix mask shows later tokens, which are the labels", "use a causal mask")


def text_objective(spec: Model, tokenizer: Tokenizer) -> tuple[Objective, str]:
    """Return the objective of a spec on plain text and its name: masked tokens if it is bidirectional, else the next token."""
    if spec.order() == "both":
        return MaskedTokens(mask=tokenizer.id_of(MASK), vocab=tokenizer.size), "predicting masked tokens"
    return next_token, "predicting the next token"
