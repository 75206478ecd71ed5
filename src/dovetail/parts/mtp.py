"""Multi-token prediction: one depth, a block that predicts one token further than the hidden states it reads.

    hᵏᵢ = norm(block(M [norm E(tᵢ₊ₖ); norm hᵏ⁻¹ᵢ]))        M (embed, 2·embed);  h, E(t) (…, n, embed)

hᵏ goes through the model's own head, whose logits predict tᵢ₊ₖ₊₁, and to the next depth. The embedding E is the model's own.
The three norms have weights of their own; the block has its own decode state. `core/multi_token.py` chains the depths in
training,
`model.draft` one by one.        DeepSeek-AI 2024 (DeepSeek-V3), section 2.2
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Mixer, Mtp, MtpModule, Norm
from dovetail.core.linear import Linear
from dovetail.core.module import Module
from dovetail.core.part import Part, Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight
from dovetail.model import Block, BlockModule


@register("mtp")
class MtpDepth(Mtp):
    """One depth of multi-token prediction: a block that reads the hidden state and the next token (DeepSeek-V3)."""

    TAPS = {"projected": "pos channel", "hidden": "pos channel"}

    block: Block = child("block")
    norm: Norm = child("rmsnorm")

    SAMPLES = {
        "weight": [0.3, 0.1],
        "block": [
            {"mixer": {"heads": 6, "head": 12}, "ffn": {"hidden": 44}},
            {"mixer": {"heads": 6, "head": 12, "mask": ["causal", {"kind": "window", "size": 5}]}, "ffn": None},
        ],
    }

    def axes(self, scope: Scope) -> Scope:
        return scope.add(halves=2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="proj.weight", out=("embed",), inp=("halves", "embed"))]

    def children(self) -> dict[str, Part]:
        return {"embed_norm": self.norm, "hidden_norm": self.norm, "block": self.block, "norm": self.norm}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        several = child == "block" and self.block.wire.streams() > 1
        return dc.replace(scope, opens=several, closes=several)

    def check(self, scope: Scope) -> list[Problem]:
        if self.block.cross is not None:
            return [Problem("block.cross", "a block of multi-token prediction reads no encoder output", "cross: null")]
        if self.block.shares is not None:
            return [Problem("block.shares", "a block of multi-token prediction has weights of its own", "shares: null")]
        parts = self.block.parts().items()
        if reading := [name for name, part in parts if part.reads(scope)]:
            what = "a block of multi-token prediction reads no values of layers or of the model"
            return [Problem(f"block.{reading[0]}", what, "use a branch that reads none")]
        return [
            Problem(f"block.{name}", f"{mixer.kind} sees later tokens, which are the labels", "use a causal mixer")
            for name, mixer in parts
            if isinstance(mixer, Mixer) and mixer.order() != "causal"
        ]


class MtpDepthModule(MtpModule, of=MtpDepth):
    """before, embedded (…, n, embed) -> like before."""

    proj: Linear
    embed_norm: Module
    hidden_norm: Module
    block: BlockModule
    norm: Module

    def forward(self, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        halves = torch.cat([self.embed_norm(embedded, ctx), self.hidden_norm(before, ctx)], -1)
        x = self.block(ctx.tap(self, "projected", self.proj(halves)), ctx, views)
        return ctx.tap(self, "hidden", self.norm(x, ctx))
