"""Objectives: what a batch asks of a model. Each is passed into the one loop and turns a batch into a loss.

    next_token     −log p(xᵢ₊₁ | x₁ … xᵢ)                                    causal models
    MaskedTokens   −log p(xᵢ | the text with a share of its tokens hidden)   bidirectional models (Devlin et al. 2018)
    seq2seq        −log p(yᵢ₊₁ | y₁ … yᵢ, source)                            encoder–decoders
    classify       −log p(class | x)                                         heads that answer once a row

Shapes: tokens, labels (batch, n); source (batch, m); classes (batch,). Padding (at.seg < 0) is never asked for.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Protocol

import torch
from torch import Tensor

from dovetail.construction import generator
from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.fold import declared
from dovetail.datasets.corpus import Batch
from dovetail.model import Model, ModelModule
from dovetail.ops.loss import IGNORED
from dovetail.text.tokenizer import MASK, Tokenizer


class Objective(Protocol):
    """(model, batch, seed, training) -> loss: all draws come from `seed`; dropout is drawn in training alone."""

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> Tensor:
        """The mean loss of the batch, a scalar."""
        ...


def _ctx(batch: Batch, seed: int, training: bool) -> Ctx:
    # what parts add (a balance of experts) shapes training; what is held out is judged by the objective alone
    return Ctx(layout=batch.layout, seed=seed if training else None, losses={} if training else None)


def _real(labels: Tensor, batch: Batch) -> Tensor:
    return labels.masked_fill(~batch.layout.real, IGNORED)


def next_token(model: ModelModule, batch: Batch, seed: int, training: bool) -> Tensor:
    """The batch's labels are its tokens, one further."""
    return model.loss(batch.tokens, _real(batch.labels, batch), _ctx(batch, seed, training))


def classify(model: ModelModule, batch: Batch, seed: int, training: bool) -> Tensor:
    """The batch's labels are classes (batch,), one a row."""
    return model.loss(batch.tokens, batch.labels, _ctx(batch, seed, training))


def seq2seq(model: ModelModule, batch: Batch, seed: int, training: bool) -> Tensor:
    """The batch's tokens are the target from its start token on, its labels the target; the source is encoded first."""
    assert batch.source is not None, "a seq2seq batch has a source"
    assert batch.source_layout is not None, "a seq2seq batch says where its source stands"
    ctx = _ctx(batch, seed, training)
    encoder_output, encoder_layout = model.encode(batch.source, dc.replace(ctx, layout=batch.source_layout))
    ctx = dc.replace(ctx, encoder_output=encoder_output, encoder_layout=encoder_layout)
    return model.loss(batch.tokens, _real(batch.labels, batch), ctx)


@dc.dataclass(frozen=True)
class MaskedTokens:
    """A share of the tokens is chosen; of those most are hidden, some replaced, some kept, and all are asked for. The kept
    and replaced ones make the model look at tokens it can see, too."""

    mask: int  # the id that hides a token
    vocab: int  # replacements are drawn from 0 … vocab − 1
    share: float = 0.15
    hidden: float = 0.8
    replaced: float = 0.1

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> Tensor:
        """The loss on the chosen tokens; labels of the batch are not looked at."""
        tokens, labels = self.hide(batch.tokens, batch.layout.real, seed)
        return model.loss(tokens, labels, _ctx(batch, seed, training))

    def hide(self, tokens: Tensor, real: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """What the model sees (batch, n), and what it is asked for (batch, n): −100 where nothing."""
        draw = generator(seed, "masked tokens")
        chosen = (torch.rand(tokens.shape, generator=draw) < self.share) & real
        fate = torch.rand(tokens.shape, generator=draw)
        others = torch.randint(0, self.vocab, tokens.shape, generator=draw)
        seen = torch.where(chosen & (fate < self.hidden), self.mask, tokens)
        seen = torch.where(chosen & (fate >= self.hidden) & (fate < self.hidden + self.replaced), others, seen)
        return seen, tokens.masked_fill(~chosen, IGNORED)


def check_learns_text(spec: Model) -> None:
    """Raise unless a plain text can teach this spec anything."""
    over_vocab = {d.path.partition(".")[0] for d in declared(spec) if "vocab" in d.weight.out}
    if spec.encoder is not None:
        raise SpecError(
            "encoder", "a plain text has no sources and targets", "use dovetail.training.objective.seq2seq in Python"
        )
    if "embed" not in over_vocab:
        raise SpecError("embed", f"{spec.embed.kind} does not read tokens", "--set embed=tokens")
    if "head" not in over_vocab:
        raise SpecError("head", "a plain text asks for a token at every place", "--set head=lm")
    if spec.order() == "ahead":
        raise SpecError("layers", "a prefix that sees ahead would be asked for what it sees", "use a causal mask")


def text_objective(spec: Model, tokenizer: Tokenizer) -> tuple[Objective, str]:
    """What a plain text asks of a spec: one that sees both ways fills in, any other goes on; and a word on it."""
    if spec.order() == "both":
        return MaskedTokens(mask=tokenizer.id_of(MASK), vocab=tokenizer.size), "learning to fill in masked tokens"
    return next_token, "learning the next token"
