"""Seeded bugs of the training loss: it is computed from other logits than the model's outputs, or drops a term."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.loss import LossSum
from dovetail.parts import head
from dovetail.parts.head import LmModule, PooledEmbeddingModule
from dovetail.proof.laws.mutant import Mutant, instead, spec

_chunked, _loss, _model_loss = head.chunked_cross_entropy, LmModule.loss, ModelModule.loss


def without(**fields: Any) -> Callable[..., LossSum]:
    """The loss of a head with these fields instead of its own."""

    def loss(self: LmModule, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        part = self.part
        self.part = dc.replace(part, **fields)
        try:
            return _loss(self, x, labels, ctx)
        finally:
            self.part = part

    return loss


def ignored_labels_counted(logits: Any, x: Tensor, labels: Tensor, *how: Any) -> LossSum:
    return _chunked(logits, x, labels.clamp_min(0), *how)


def added_losses_dropped(self: Ctx, loss: Tensor) -> Tensor:
    return loss


def losses_replaced(self: ModelModule, inputs: Tensor, targets: Tensor, ctx: Ctx) -> Tensor:
    return _model_loss(self, inputs, targets, dc.replace(ctx, losses=Losses()) if ctx.draws is not None else ctx)


def vector_not_normalized(self: PooledEmbeddingModule, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
    return head._summed(1 - (self.forward(x, ctx) * labels).sum(-1))


def with_head(**fields: Any) -> Model:
    """A small Llama with this head."""
    return spec().set("head", fields)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    lm = with_head(kind="lm", scale=0.5, softcap=3.0, bias=True)
    router = {"kind": "softmax_router", "balance_loss": 0.5, "z_loss": 0.1}
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20, "router": router})
    return [
        Mutant("the loss ignores the soft-cap of the head", "loss", instead(LmModule, "loss", without(softcap=None)), lm),
        Mutant("the loss ignores the scale of the head", "loss", instead(LmModule, "loss", without(scale=1.0)), lm),
        Mutant("the loss ignores the bias of the head", "loss", instead(LmModule, "loss", without(bias=False)), lm),
        Mutant("labels of -100 are counted", "loss", instead(head, "chunked_cross_entropy", ignored_labels_counted), lm),
        Mutant("the losses of routers are dropped", "loss", instead(Ctx, "with_added", added_losses_dropped), experts),
        Mutant("the dict for losses stays empty in training", "loss", instead(ModelModule, "loss", losses_replaced), experts),
        Mutant(
            "a cosine loss does not divide by the lengths",
            "loss",
            instead(PooledEmbeddingModule, "loss", vector_not_normalized),
            with_head(kind="pooled_embedding"),
        ),
    ]
