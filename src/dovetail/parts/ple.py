"""Per-layer embeddings: every layer has a small table of its own, and adds what it finds there, gated by the residual stream.

    e = (rms(x₀ W_p/√embed) + T[id]·√piece)/√2           x₀ the embeddings, id the token; rms with a scale
    y = rms((act(x W_g) ∘ e) W_o)                        added to x behind the ffn; no wire norms around it

Shapes: x, x₀, y (…, n, embed)   e (…, n, piece)   T (vocab, piece). Gemma 3n and Gemma 4 hold the tables of all layers in one,
and use one scale of e's norm in all layers (`shares_norm`).
"""

from __future__ import annotations

import dataclasses as dc
from math import sqrt
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.block import Block
from dovetail.nn.cross_layer import DISCARDED, Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act, Ffn, Norm, Steps
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Read, Weight


@register("ple")
class Ple(Ffn):
    """Per-layer embeddings of token ids, gated by the residual stream (Gemma 3n)."""

    TAPS = {"found": "pos channel", "out": "pos channel"}
    norms_itself: ClassVar[bool] = True

    piece: int = bounded(16, above=0)  # channels of the table
    act: Act = child("gelu_tanh")
    norm: Norm = child("rmsnorm")
    shares_norm: int | None = bounded(None, at_least=0)  # an earlier layer, whose norm of what is found it uses

    def axes(self, scope: Scope) -> Scope:
        return scope.add(piece=self.piece)

    def children(self) -> dict[str, Part]:
        return {"found_norm": self.norm, "out_norm": self.norm}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        if child == "out_norm":
            return scope.bind(dim="embed")
        own = scope.shares if self.shares_norm is None else self.shares_norm
        return dc.replace(scope.bind(dim="piece"), shares=own)

    def check(self, scope: Scope) -> list[Problem]:
        if self.shares_norm is None or self.shares_norm < scope.layer:
            return []
        what = f"layer {scope.layer} cannot use the norm of layer {self.shares_norm}"
        return [Problem("shares_norm", what, "give the number of an earlier layer, from 0")]

    def weights(self, scope: Scope) -> list[Weight]:
        piece, embed = ("piece",), ("embed",)
        return [
            Weight(name="table", out=("vocab",), inp=piece, role="embed"),
            Weight(name="project.weight", out=piece, inp=embed),
            Weight(name="gate.weight", out=piece, inp=embed),
            Weight(name="o.weight", out=embed, inp=piece),
        ]

    def reads(self, scope: Scope) -> list[Read]:
        return [Read(scope.of_model(), "inputs"), Read(scope.of_model(), "embedded", ("embed",))]


class PleProof(Proof, of=Ple):
    """Sampled values."""

    samples = {"piece": [5, 9], "shares_norm": [None]}  # two layers must agree


class PleModule(Module, of=Ple):
    """x (…, n, embed), ids (…, n), embeddings (…, n, embed) -> like x."""

    part: Ple
    table: Tensor
    project: Linear
    gate: Linear
    o: Linear
    found_norm: Module
    out_norm: Module

    def setup(self) -> None:
        self.act, self.piece, self.width = self.part.act.function, self.scope.size("piece"), self.scope.size("embed")

    def forward(self, x: Tensor, ctx: Ctx, values: Values = DISCARDED) -> Tensor:
        own = self.found_norm(self.project(values["embedded"], ctx) * self.width**-0.5, ctx)
        found = F.embedding(values["inputs"], self.table) * sqrt(self.piece)
        found = ctx.tap(self, "found", (own + found.to(own.dtype)) * 2**-0.5)
        return ctx.tap(self, "out", self.out_norm(self.o(self.act(self.gate(x, ctx)) * found, ctx), ctx))


@register("ple_block")
class PleBlock(Block):
    """A block that ends with a per-layer embedding (Gemma 3n)."""

    STEPS: ClassVar[Steps] = (*Block.STEPS, ("ple",))

    ple: Ffn = child("ple")
