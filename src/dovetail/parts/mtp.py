"""Multi-token prediction: one depth, a block that predicts one token further than the hidden states it reads.

    hᵏᵢ = norm(block(M [norm E(tᵢ₊ₖ); norm hᵏ⁻¹ᵢ]))        M (embed, 2·embed);  h, E(t) (…, n, embed)

hᵏ goes through the model's own head, whose logits predict tᵢ₊ₖ₊₁, and to the next depth. The embedding E is the model's own.
The three norms have weights of their own; the block has its own decode state. `model/multi_token.py` chains the depths in
training, `model.draft` one by one.        DeepSeek-AI 2024 (DeepSeek-V3), section 2.2

Medusa: one head, which predicts a further token from the hidden states of the model alone.

    hᵏᵢ = r_B(… r₁(h⁰ᵢ))        r(x) = x + SiLU(W x + b)        W (embed, embed), b (embed);  h (…, n, embed)

hᵏ goes through the model's head, or one of its own, whose logits predict tᵢ₊ₖ₊₁. W and b are zero at first: hᵏ = h⁰, so that a
fresh head without one of its own predicts what the model predicts. It reads no token and has no decode state: the last hidden
state alone gives the drafts of all heads. A model has one `medusa` per further token in its field `mtp`, which
`model/multi_token.py` trains.

Cai et al. 2024 (Medusa), section 2.1: Medusa-1 trains the heads on a frozen model, Medusa-2 both together.

EAGLE: one block, which predicts the next hidden state of the model from the last one and the next token.

    ĥᵢ₊₁ = block(M [E(tᵢ₊₁); hᵢ] + b)        M (embed, 2·embed), b (embed);  h, E(t), ĥ (…, n, embed)
    loss = λ · smooth L1(ĥᵢ₊₁ − hᵢ₊₁) + λ · probs · cross-entropy(p(hᵢ₊₁), p(ĥᵢ₊₁))        p = softmax(head(·)), (…, n, vocab)

The embedding and the head are those of the model. The head reads ĥᵢ₊₁ as it reads hᵢ₊₁, and predicts tᵢ₊₂; ĥᵢ₊₁ and this token
are the next input where hᵢ₊₁ is not known yet. So one block drafts any number of tokens, with one KV cache of its own: entries
of known tokens come from hidden states of the model, those of drafts from its own. In training, noise is added to hᵢ, since
ĥᵢ differs from it, too: in the paper uniform within ±0.1, here normal of about its standard deviation.

Li et al. 2024 (EAGLE), sections 3.1 and 3.2
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.block import Block, BlockModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act, AheadTerm, Head, Mixer, Mtp, MtpModule, MtpProof, Norm
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Part, Problem, child, register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


class BlockDepth(Mtp):
    """A depth with a block, which reads a hidden state and the next token through one projection."""

    TAPS = {"projected": "pos channel", "hidden": "pos channel"}

    block: Block

    def axes(self, scope: Scope) -> Scope:
        return scope.add(halves=2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="proj.weight", out=("embed",), inp=("halves", "embed"))]

    def children(self) -> dict[str, Part]:
        return {"block": self.block}

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


class BlockDepthProof(MtpProof, of=BlockDepth):
    """Sampled values."""

    samples = {
        "weight": [0.3, 0.1],
        "block": [
            {"mixer": {"heads": 6, "head": 12}, "ffn": {"hidden": 44}},
            {"mixer": {"heads": 6, "head": 12, "mask": ["causal", {"kind": "window", "size": 5}]}, "ffn": None},
        ],
    }


@register("mtp")
class MtpDepth(BlockDepth):
    """One depth of multi-token prediction: a block that reads the hidden state and the next token (DeepSeek-V3)."""

    block: Block = child("block")
    norm: Norm = child("rmsnorm")

    def children(self) -> dict[str, Part]:
        return {"embed_norm": self.norm, "hidden_norm": self.norm, "block": self.block, "norm": self.norm}


class MtpDepthModule(MtpModule, of=MtpDepth):
    """before, embedded (…, n, embed) -> like before."""

    proj: Linear
    embed_norm: Module
    hidden_norm: Module
    block: BlockModule
    norm: Module

    def forward(self, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        halves = torch.cat([self.embed_norm(embedded, ctx), self.hidden_norm(before, ctx)], -1)
        x = self.block(ctx.tap(self, "projected", self.proj(halves, ctx)), ctx, views)
        return ctx.tap(self, "hidden", self.norm(x, ctx))


@register("eagle")
class Eagle(BlockDepth):
    """EAGLE: a block that predicts the next hidden state from the last one and the next token, and reads its own further on."""

    recurs = True

    block: Block = child("block")
    probs: float = bounded(0.1, at_least=0, at_most=MAX_FACTOR)  # the cross-entropy of the model's probs, per unit of `weight`
    noise: float = bounded(0.05, at_least=0)  # its standard deviation, on the hidden states that are read in training

    def weights(self, scope: Scope) -> list[Weight]:
        return [*super().weights(scope), Weight(name="proj.bias", out=("embed",), init="zeros", role="bias")]

    def loss_terms(self) -> Mapping[AheadTerm, float]:
        terms: dict[AheadTerm, float] = {"hidden": self.weight}
        if self.probs:
            terms["probs"] = self.weight * self.probs
        return terms


class EagleProof(BlockDepthProof, of=Eagle):
    """Sampled values."""

    samples = {**BlockDepthProof.samples, "probs": [0.1, 0.5], "noise": [0.05, 0.0]}


class EagleModule(MtpModule, of=Eagle):
    """before, embedded (…, n, embed) -> like before."""

    part: Eagle
    proj: Linear
    block: BlockModule

    def forward(self, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        if ctx.draws is not None:
            before = ctx.draws.noise(ctx, before, self.part.noise, self, "noise")
        both = torch.cat([embedded, before], -1)
        return ctx.tap(self, "hidden", self.block(ctx.tap(self, "projected", self.proj(both, ctx)), ctx, views))


MAX_BLOCKS = 64  # each has a module of its own: a spec must not make a billion


@register("medusa")
class Medusa(Mtp):
    """A Medusa head: residual layers on the hidden state of the model, then the model's head or its own."""

    inputs = ("hidden",)

    blocks: int = bounded(1, above=0, at_most=MAX_BLOCKS)  # residual layers
    act: Act = child("silu")
    head: Head | None = None  # its own; None: that of the model

    def own_head(self) -> Head | None:
        return self.head

    def weights(self, scope: Scope) -> list[Weight]:
        embed = ("embed",)
        return [
            weight
            for i in range(self.blocks)
            for weight in (
                Weight(name=f"residual_{i}.weight", out=embed, inp=embed, init="zeros"),
                Weight(name=f"residual_{i}.bias", out=embed, init="zeros", role="bias"),
            )
        ]

    def children(self) -> dict[str, Part]:
        return {} if self.head is None else {"head": self.head}

    def check(self, scope: Scope) -> list[Problem]:
        if self.head is None:
            return []
        remedy = "use {kind: lm, tied: false}, or null for the head of the model"
        if not self.head.predicts_tokens(scope):
            return [Problem("head", f"{self.head.kind} has no logits over the vocabulary per token", remedy)]
        if any(weight.same_as is not None for weight in self.head.weights(scope)):
            return [Problem("head", "is tied to the embedding; a head of its own has weights of its own", remedy)]
        return []


class MedusaProof(MtpProof, of=Medusa):
    """Sampled values."""

    samples = {"weight": [0.3, 0.1], "blocks": [1, 2], "head": [None, {"kind": "lm", "tied": False}]}


class MedusaModule(MtpModule, of=Medusa):
    """hidden (…, n, embed) -> like hidden."""

    part: Medusa

    def setup(self) -> None:
        self.act = self.part.act.function
        self.names = [f"residual_{i}" for i in range(self.part.blocks)]  # by name: a quantizer replaces leaves

    def forward(self, hidden: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        for name in self.names:
            hidden = hidden + self.act(self.get_submodule(name)(hidden, ctx))
        return ctx.tap(self, "hidden", hidden)
