"""Heads: x (…, n, embed) -> outputs per token, or per document where the head pools; and their loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.loss import LossSum
from dovetail.nn.module import Module, entry
from dovetail.spec.part import Part
from dovetail.spec.scope import Scope

if TYPE_CHECKING:
    import torch


Criterion = Literal["cross_entropy", "cosine", "mse"]


class Head(Part):
    """The output head: logits, scores or an embedding. Module: forward(x, ctx) -> outputs; loss(x, labels, ctx) -> LossSum."""

    group: ClassVar[str] = "head"
    criterion: ClassVar[Criterion] = "cross_entropy"  # how its loss compares outputs with labels
    embeds: ClassVar[bool] = False  # whether its output is an embedding of each document

    def pools(self) -> bool:
        """Whether it pools: one output per document instead of one per token."""
        return False

    def predicts_tokens(self, scope: Scope) -> bool:
        """Whether its outputs are logits over the vocabulary per token."""
        return not self.pools() and any("vocab" in weight.out for weight in self.weights(scope))

    def ranks(self) -> bool:
        """Whether its output is one number per document, by which documents are ranked."""
        return False

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Random legal labels for outputs of this leading shape."""
        raise NotImplementedError

    def scaled_if_tied(self, scale: float) -> Head:
        """The head with this multiplier of its logits, where it is tied to the embedding; itself where it has no such field."""
        return self


class HeadModule(Module):
    """The module of a head."""

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, embed) -> (…, n, outputs), or (documents, outputs) where it pools."""
        raise NotImplementedError

    @entry()
    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        """The loss summed over labels that are not −100, and their number, of the tokens of this rank."""
        raise NotImplementedError
