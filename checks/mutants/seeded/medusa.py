"""Seeded bugs of Medusa heads: what they read, what they add, and whose head predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import HeadModule, MtpModule
from dovetail.parts.mtp import Medusa, MedusaModule
from dovetail.proof.laws.mutant import BASE, Mutant, instead

TWO = "mtp: [{kind: medusa, blocks: 2}, {kind: medusa, weight: 0.1, head: {kind: lm, tied: false}}]"


def not_residual(self: MedusaModule, hidden: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    for name in self.names:
        hidden = self.act(self.get_submodule(name)(hidden, ctx))
    return ctx.tap(self, "hidden", hidden)


def last_layer_alone(self: MedusaModule, hidden: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    """Every layer reads the hidden state of the model."""
    first = hidden
    for name in self.names:
        hidden = first + self.act(self.get_submodule(name)(first, ctx))
    return ctx.tap(self, "hidden", hidden)


def leaves_not_called(self: MedusaModule, hidden: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    """An adapter of a leaf does nothing."""
    for name in self.names:
        leaf: Any = self.get_submodule(name)
        hidden = hidden + self.act(F.linear(hidden, leaf.weight, leaf.bias))
    return ctx.tap(self, "hidden", hidden)


def head_of_the_model(self: MtpModule, head: HeadModule) -> HeadModule:
    return head


def drafts_by_the_model_head(self: ModelModule, x: Tensor, ctx: Ctx, depth: int) -> Tensor:
    return self.head(x, ctx)


def forward(function: Any) -> Any:
    """Seed another forward of a Medusa head."""
    return instead(MedusaModule, "forward", function)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    two = from_yaml(f"{BASE}{TWO}\n")
    rows = [
        ("a Medusa head reads the hidden state of the head before", "own_number", instead(Medusa, "inputs", ("before",))),
        ("a Medusa head leaves out the residual", "own_number", forward(not_residual)),
        ("every layer of a Medusa head reads the hidden state of the model", "own_number", forward(last_layer_alone)),
        ("the own head of a Medusa head is never used", "every_weight", instead(MtpModule, "predictor", head_of_the_model)),
        (
            "a Medusa head drafts by the head of the model",
            "drafted",
            instead(ModelModule, "logits_ahead", drafts_by_the_model_head),
        ),
        ("a Medusa head leaves out its adapter", "adapted", forward(leaves_not_called)),
    ]
    return [Mutant(name, law, seed, two) for name, law, seed in rows]
