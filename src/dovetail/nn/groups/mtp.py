"""Depths of multi-token prediction: hidden states (…, n, embed) -> those from which a head predicts a further token."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from dovetail.nn.groups.head import Head, HeadModule
from dovetail.nn.module import Module
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Part
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope

AheadInput = Literal["hidden", "before", "embedded"]
AheadTerm = Literal["labels", "hidden", "probs"]


@dc.dataclass(frozen=True, kw_only=True)
class Mtp(Part):
    """One depth of multi-token prediction: hidden states, from which a head predicts one token further than the depth before.
    Depth k is at position i where its head predicts token i + k + 1. Module: an MtpModule."""

    group: ClassVar[str] = "mtp"
    TAPS = {"hidden": "pos channel"}  # what it returns
    # what it reads at position i, in the order of its forward: `hidden` is the hidden state of the model, `before` that of the
    # depth before (at depth 1 of the model), `embedded` the embedding of token i + k
    inputs: ClassVar[tuple[AheadInput, ...]] = ("before", "embedded")
    # whether its hidden state at position i predicts that of the model at i + 1: it reads its own where the model's is not
    # known yet, so that one depth, the only one of its model, drafts any number of tokens
    recurs: ClassVar[bool] = False

    weight: float = bounded(0.3, at_least=0, at_most=MAX_FACTOR)  # λ, the factor of its loss

    def loss_terms(self) -> Mapping[AheadTerm, float]:
        """The terms of its loss and their factors: `labels` is the cross-entropy of the labels, `probs` that of the model's
        probs at token i + k, `hidden` the smooth L1 distance to the model's hidden state there."""
        return {"labels": self.weight}

    def own_head(self) -> Head | None:
        """The head that predicts from its hidden states, a child called `head`; None: the head of the model."""
        return None

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
        return {"kind": "mtp", **data} if isinstance(data, Mapping) else super().from_short_form(data)


class MtpProof(Proof, of=Mtp):
    """Exceptions."""

    def excepts(self, part: Mtp, scope: Scope) -> dict[str, str]:
        reason = "an output: the loss computes the logits in chunks, and passes them to no listener"
        return {} if part.own_head() is None else {"looking.head.*": reason}


class MtpModule(Module):
    """The module of a depth of multi-token prediction."""

    head: HeadModule  # where it has one of its own

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(*inputs, ctx, views) -> hidden states; the inputs, each (…, n, embed), are those that the part declares."""
        raise NotImplementedError

    def predictor(self, head: HeadModule) -> HeadModule:
        """The head of this depth: its own, or `head`, that of the model."""
        return head if self.part.own_head() is None else self.head
