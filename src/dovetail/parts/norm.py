"""Norms over the last dimension, the generic axis `dim`.

    layernorm   (x − mean x) / √(var x + eps) · scale + shift        Ba et al. 2016
    rmsnorm     x / √(mean x² + eps) · scale                          Zhang & Sennrich 2019

With `plus_one` the factor is 1 + scale, so that weight decay pulls it to 1 (Gemma, Nemotron). With `groups` the channels form
groups of equal size, and the mean of x² is over one group: the gated norm of Mamba-2 (Dao & Gu 2024; Nemotron-H, Falcon-H1). An
RMSNorm without `scale` has no weights (Gemma 4's norm of values).

Statistics are per token. Where `dim` is sharded across ranks, the sums are all-reduced.
"""

from __future__ import annotations

import dataclasses as dc

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx, replaced
from dovetail.nn.groups import Norm
from dovetail.nn.module import Module, at_least_fp32
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, broken, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

EPS = "use a small positive number, such as 1e-5"
WRONG_EPS = FieldCause("norm's eps", (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-2))


@register("layernorm")
class LayerNorm(Norm):
    """LayerNorm: zero mean and unit variance per token, then a learned scale and shift."""

    eps: float = bounded(1e-5, above=0, remedy=EPS)
    shift: bool = True
    plus_one: bool = False  # the factor is 1 + scale (Nemotron)

    def weights(self, scope: Scope) -> list[Weight]:
        dim = scope.names(("dim",))
        scale = Weight(name="scale", out=dim, over=dim, init="zeros" if self.plus_one else "ones", role="norm")
        shift = Weight(name="shift", out=dim, over=dim, init="zeros", role="bias")
        return [scale, shift] if self.shift else [scale]


class LayerNormProof(Proof, of=LayerNorm):
    """Sampled values and causes."""

    causes = {"eps": WRONG_EPS, "shift": FieldCause("bias missing")}
    samples = {"eps": [1e-5, 0.1], "shift": [True, False], "plus_one": [False, True]}


class LayerNormModule(Module, of=LayerNorm):
    """x (…, dim) -> like x."""

    part: LayerNorm
    scale: Tensor
    shift: Tensor

    def setup(self) -> None:
        self.dim, self.size = self.scope.names(("dim",)), self.scope.size("dim")

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        if ctx.taps is not None:
            return self.listened(x, ctx)
        if self.part.plus_one and x.dtype != (exact := at_least_fp32(x.dtype)):
            return self.forward(x.to(exact), ctx).to(x.dtype)  # 1 + scale in bfloat16 would lose half of the bits of the scale
        scale, shift = factor(x, self.scale, self.part.plus_one), in_dtype_of(x, self.shift if self.part.shift else None)
        if not ctx.ranks.sharded(self.dim):
            return F.layer_norm(x, (x.shape[-1],), scale, shift, self.part.eps)
        centered, variance = self.moments(x, ctx)
        out = scaled(centered * torch.rsqrt(variance + self.part.eps), scale)
        return out if shift is None else out + shift

    def moments(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """x − mean x, and the variance (…, 1)."""
        centered = x - ctx.ranks.all_reduce(x.sum(-1, keepdim=True), self.dim) / self.size
        return centered, ctx.ranks.all_reduce((centered * centered).sum(-1, keepdim=True), self.dim) / self.size

    def listened(self, x: Tensor, ctx: Ctx) -> Tensor:
        """The same with taps; the formula is written out only if a listener replaces the scale."""
        out = self.forward(x, dc.replace(ctx, taps=None))
        if ctx.wants(self, "scale"):
            centered, variance = self.moments(x.to(at_least_fp32(x.dtype)), ctx)
            scale = replaced(ctx, self, "scale", torch.sqrt(variance + self.part.eps))
            if scale is not None:
                out = scaled(centered / scale, factor(centered, self.scale, self.part.plus_one)).to(x.dtype)
                shift = in_dtype_of(x, self.shift if self.part.shift else None)
                out = out if shift is None else out + shift
        return ctx.tap(self, "out", out)


@register("rmsnorm")
class RMSNorm(Norm):
    """RMSNorm: unit mean square per token, or per group of channels of a token, then a learned scale."""

    eps: float = bounded(1e-5, above=0, remedy=EPS)
    plus_one: bool = False  # the factor is 1 + scale (Gemma)
    scale: bool = True  # False: no factor
    groups: int = bounded(1, above=0)  # of channels, each normalized alone

    def weights(self, scope: Scope) -> list[Weight]:
        dim = scope.names(("dim",))
        scale = Weight(name="scale", out=dim, over=dim, init="zeros" if self.plus_one else "ones", role="norm")
        group_number = Weight(name="group_number", out=dim, role="const", dtype="int64")  # a rank's channels keep their groups
        return ([scale] if self.scale else []) + ([] if self.groups == 1 else [group_number])

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.groups).repeat_interleave(scope.size("dim") // self.groups)

    def check(self, scope: Scope) -> list[Problem]:
        size, no_scale = scope.size("dim"), "adds 1 to a scale, and this norm has none"
        return broken(
            (size % self.groups, "groups", f"{self.groups} does not divide {size} channels", ""),
            (self.plus_one and not self.scale, "plus_one", no_scale, "use false, or scale: true"),
        )


class RMSNormProof(Proof, of=RMSNorm):
    """Sampled values and causes."""

    causes = {
        "eps": WRONG_EPS,
        "plus_one": FieldCause("norm's + 1"),
        "scale": FieldCause("norm's scale missing"),
        "groups": FieldCause("norm's groups", (1, 2, 4, 8)),
    }
    samples = {"eps": [1e-5, 0.1], "plus_one": [False, True], "scale": [True, False], "groups": [1, 2]}


class RMSNormModule(Module, of=RMSNorm):
    """x (…, dim) -> like x."""

    part: RMSNorm
    scale: Tensor
    group_number: Tensor

    def setup(self) -> None:
        self.dim, self.groups = self.scope.names(("dim",)), self.part.groups
        self.size = self.scope.size("dim") // self.groups
        self.plain = self.part.scale and not self.part.plus_one and self.groups == 1

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        if ctx.taps is not None:
            return self.listened(x, ctx)
        if self.plain and ctx.ranks.axes is None and (scale := self.scale).dtype == x.dtype:  # every layer of most models
            return F.rms_norm(x, (self.size,), scale, self.part.eps)
        if self.part.plus_one and x.dtype != (exact := at_least_fp32(x.dtype)):
            return self.forward(x.to(exact), ctx).to(x.dtype)  # 1 + scale in bfloat16 would lose half of the bits of the scale
        scale = factor(x, self.scale if self.part.scale else None, self.part.plus_one)
        if not ctx.ranks.sharded(self.dim):
            return F.rms_norm(x, (self.size,), scale, self.part.eps) if self.groups == 1 else scaled(self.by_group(x), scale)
        square = ctx.ranks.all_reduce(self.summed(x * x), self.dim) / self.size
        return scaled(x * self.spread(torch.rsqrt(square + self.part.eps)), scale)

    def listened(self, x: Tensor, ctx: Ctx) -> Tensor:
        """The same with taps; the formula is written out only if a listener replaces the scale."""
        out = self.forward(x, dc.replace(ctx, taps=None))
        if ctx.wants(self, "scale"):
            wide = x.to(at_least_fp32(x.dtype))
            square = ctx.ranks.all_reduce(self.summed(wide * wide), self.dim) / self.size
            scale = replaced(ctx, self, "scale", torch.sqrt(square + self.part.eps))
            if scale is not None:
                learned = factor(wide, self.scale if self.part.scale else None, self.part.plus_one)
                out = scaled(wide / self.spread(scale), learned).to(x.dtype)
        return ctx.tap(self, "out", out)

    def by_group(self, x: Tensor) -> Tensor:
        """x (…, dim), each group of channels divided by its root mean square."""
        return F.rms_norm(x.unflatten(-1, (self.groups, self.size)), (self.size,), None, self.part.eps).flatten(-2)

    def summed(self, x: Tensor) -> Tensor:
        """The sums (…, groups) of this rank's channels of each group."""
        if self.groups == 1:
            return x.sum(-1, keepdim=True)
        return x.new_zeros(*x.shape[:-1], self.groups).index_add(-1, self.group_number, x)

    def spread(self, factor: Tensor) -> Tensor:
        """A factor per group (…, groups) as one per channel of this rank."""
        return factor if self.groups == 1 else factor.index_select(-1, self.group_number)


def in_dtype_of(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """A weight in the dtype of x: a router norms in float32 whatever the model's dtype is."""
    return weight if weight is None or weight.dtype == x.dtype else weight.to(x.dtype)


def factor(x: Tensor, scale: Tensor | None, plus_one: bool) -> Tensor | None:
    """What a normed x is multiplied by, in its dtype."""
    scale = in_dtype_of(x, scale)
    return scale + 1.0 if scale is not None and plus_one else scale


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x · scale, where there is a scale."""
    return x if scale is None else x * scale
