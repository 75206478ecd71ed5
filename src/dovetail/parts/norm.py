"""Norms over the last dimension, the generic axis `dim`.

    layernorm   (x − mean x) / √(var x + eps) · scale + shift        Ba et al. 2016
    rmsnorm     x / √(mean x² + eps) · scale                          Zhang & Sennrich 2019

With `plus_one` the factor is 1 + scale, so that weight decay pulls it to 1 (Gemma, Nemotron).

Statistics are per token. Where `dim` is sharded across ranks, the sums are all-reduced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.field import bounded
from dovetail.core.group import Norm
from dovetail.core.module import Module
from dovetail.core.part import Mistake, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

EPS = "use a small positive number, such as 1e-5"
WRONG_EPS = Mistake("norm's eps", (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-2))


@register("layernorm")
class LayerNorm(Norm):
    """LayerNorm: zero mean and unit variance per token, then a learned scale and shift."""

    MISTAKES = {"eps": WRONG_EPS, "shift": Mistake("bias missing")}

    eps: float = bounded(1e-5, above=0, remedy=EPS)
    shift: bool = True
    plus_one: bool = False  # the factor is 1 + scale (Nemotron)

    def module(self) -> type[Module]:
        return LayerNormModule

    def weights(self, scope: Scope) -> list[Weight]:
        dim = scope.names(("dim",))
        scale = Weight(name="scale", out=dim, over=dim, init="zeros" if self.plus_one else "ones", role="norm")
        shift = Weight(name="shift", out=dim, over=dim, init="zeros", role="bias")
        return [scale, shift] if self.shift else [scale]

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"eps": [1e-5, 0.1], "shift": [True, False], "plus_one": [False, True]}


class LayerNormModule(Module):
    """x (…, dim) -> like x."""

    part: LayerNorm
    scale: Tensor
    shift: Tensor

    def setup(self) -> None:
        self.dim, self.size = self.scope.names(("dim",)), self.scope.size("dim")

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        scale, shift = self.scale + 1.0 if self.part.plus_one else self.scale, self.shift if self.part.shift else None
        if not ctx.sharded(self.dim):
            return F.layer_norm(x, (x.shape[-1],), scale, shift, self.part.eps)
        centered = x - ctx.all_reduce(x.sum(-1, keepdim=True), self.dim) / self.size
        variance = ctx.all_reduce((centered * centered).sum(-1, keepdim=True), self.dim) / self.size
        out = centered * torch.rsqrt(variance + self.part.eps) * scale
        return out if shift is None else out + shift


@register("rmsnorm")
class RMSNorm(Norm):
    """RMSNorm: unit mean square per token, then a learned scale."""

    MISTAKES = {"eps": WRONG_EPS, "plus_one": Mistake("norm's + 1")}

    eps: float = bounded(1e-5, above=0, remedy=EPS)
    plus_one: bool = False  # the factor is 1 + scale (Gemma)

    def module(self) -> type[Module]:
        return RMSNormModule

    def weights(self, scope: Scope) -> list[Weight]:
        dim = scope.names(("dim",))
        return [Weight(name="scale", out=dim, over=dim, init="zeros" if self.plus_one else "ones", role="norm")]

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"eps": [1e-5, 0.1], "plus_one": [False, True]}


class RMSNormModule(Module):
    """x (…, dim) -> like x."""

    part: RMSNorm
    scale: Tensor

    def setup(self) -> None:
        self.dim, self.size = self.scope.names(("dim",)), self.scope.size("dim")

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        scale = self.scale + 1.0 if self.part.plus_one else self.scale
        if not ctx.sharded(self.dim):
            return F.rms_norm(x, (x.shape[-1],), scale, self.part.eps)
        square = ctx.all_reduce((x * x).sum(-1, keepdim=True), self.dim) / self.size
        return x * torch.rsqrt(square + self.part.eps) * scale
