"""Manifold-constrained hyper-connections: s residual streams, of which each branch reads a mixture and writes to all.

    u = rms(vec X)                                      X (…, n, s, embed), vec X (…, n, s·embed); without a learned scale
    pre | post | comb = u Mᵀ · scale + base             M (2s + s², s·embed), one for each step
    x = Σᵢ (σ(pre)ᵢ + ε) Xᵢ                             what the branch reads
    Xⱼ ← 2 σ(post)ⱼ · f(norm x) + Σᵢ Kᵢⱼ Xᵢ             K = Sinkhorn(softmax(comb) + ε): rows and columns sum to 1

Every stream is a mixture of all with weights that sum to 1, so that depth neither amplifies nor fades them. The streams begin
as copies of the embedding and end as one more mixture, Σᵢ (σ(end)ᵢ + ε) Xᵢ. Initially a stream is mixed with itself alone, the
branch reads the mean and writes to all alike: pre-norm. Everything but the branches is computed in float32.
Zhu et al. 2024 (Hyper-connections); Xie et al. 2026 (mHC).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.block import Branching, Scaled, ScaledProof, WireModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Steps
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

START, APART = 0.01, -8.0  # initial scale of what depends on the token; initial logit of mixing two streams


@register("mhc")
class Mhc(Scaled):
    """Manifold-constrained hyper-connections: several residual streams."""

    sums: ClassVar[bool] = False

    count: int = bounded(4, at_least=2, at_most=16)  # residual streams
    iterations: int = bounded(20, at_least=1, at_most=100)  # of Sinkhorn's algorithm, each over rows and columns
    eps: float = bounded(1e-6, above=0)
    norm_eps: float = bounded(1e-6, above=0)

    def streams(self) -> int:
        return self.count

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{step[0]}_norm" for step in steps)

    def axes(self, scope: Scope) -> Scope:
        return super().axes(scope).add(streams=self.count, coefficients=(2 + self.count) * self.count, factors=3)

    def weights(self, scope: Scope) -> list[Weight]:
        read, out, steps = ("streams", "embed"), ("coefficients",), ("steps",)
        mixing = [Weight(name=f"mix{i}.weight", out=out, inp=read, tp="replicate") for i in range(scope.size("steps"))]
        result = [
            *super().weights(scope),
            *mixing,
            Weight(name="base", batch=steps, out=out, init="const", role="bias", tp="replicate"),
            Weight(name="factor", batch=steps, out=("factors",), init="const", role="gate"),
        ]
        if not scope.closes:
            return result
        return [
            *result,
            Weight(name="end.weight", out=("streams",), inp=read, tp="replicate"),
            Weight(name="end_base", out=("streams",), init="const", role="bias", tp="replicate"),
            Weight(name="end_factor", out=("one",), init="const", role="gate"),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        mean = torch.full((self.count,), -log(self.count - 1), dtype=torch.float64)  # σ of it is 1/s
        if name == "base":
            apart = APART * (1 - torch.eye(self.count, dtype=torch.float64))
            return torch.cat([mean, torch.zeros_like(mean), apart.flatten()]).repeat(scope.size("steps"), 1)
        if name == "end_base":
            return mean
        if name == "factor":
            return torch.full((scope.size("steps"), 3), START, dtype=torch.float64)
        return torch.full((1,), START, dtype=torch.float64) if name == "end_factor" else super().constant(name, scope)

    def taps(self, scope: Scope) -> Mapping[str, str]:
        """Of each step, the logits of what it reads, writes and mixes, before their factor and base; and of the end."""
        names = [*(f"mix{i}" for i in range(scope.size("steps"))), *(["end"] if scope.closes else [])]
        return {name: "pos stream" if name == "end" else "pos coefficient" for name in names}

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        mixing = 2 * n * scope.size("steps", "streams", "streams", "embed")
        return mixing, mixing


class MhcProof(ScaledProof, of=Mhc):
    """Sampled values."""

    samples = {**ScaledProof.samples, "count": [2, 3], "iterations": [20, 2], "eps": [1e-6, 0.01], "norm_eps": [1e-6, 0.1]}


class MhcModule(WireModule, of=Mhc):
    """x (…, n, streams, embed) -> like x."""

    base: Tensor
    factor: Tensor
    end: Linear
    end_base: Tensor
    end_factor: Tensor

    def setup(self) -> None:
        assert isinstance(self.part, Mhc)
        self.count, self.iterations, self.eps, self.norm_eps = (
            self.part.count,
            self.part.iterations,
            self.part.eps,
            self.part.norm_eps,
        )

    def open(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.count, x.shape[-1])

    def close(self, x: Tensor, ctx: Ctx | None = None) -> Tensor:
        logits = self.end(self.flat(x), ctx)
        logits = logits if ctx is None else ctx.tap(self, "end", logits)
        return self.mixture(logits * self.end_factor + self.end_base, x)

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for i, step in enumerate(block.steps):
            pre, post, mixing = self.coefficients(x, i, ctx)
            y = self.sum(block, step, block.normed(f"{step[0]}_norm", self.mixture(pre, x), ctx), ctx, views)
            wide = post[..., None] * y.to(post.dtype)[..., None, :] + mixing.transpose(-1, -2) @ x.to(mixing.dtype)
            x = ctx.tap(block, f"after_{step[0]}", wide.to(x.dtype))
        return x

    def flat(self, x: Tensor) -> Tensor:
        """(…, n, streams·embed), normed, in float32."""
        x = x.flatten(-2).to(at_least_fp32(x.dtype))
        return F.rms_norm(x, x.shape[-1:], eps=self.norm_eps)

    def mixture(self, logits: Tensor, x: Tensor) -> Tensor:
        """Σᵢ (σ(logits)ᵢ + ε) Xᵢ: (…, n, embed)."""
        weights = torch.sigmoid(logits) + self.eps
        return (weights[..., None] * x.to(weights.dtype)).sum(-2).to(x.dtype)

    def coefficients(self, x: Tensor, step: int, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
        """The logits (…, n, streams) of what a step reads, the weights (…, n, streams) with which it writes, and the
        doubly stochastic matrix (…, n, streams, streams) that mixes the streams: from the first axis to the second."""
        s, sizes = self.count, (self.count, self.count, self.count**2)
        mixed = ctx.tap(self, f"mix{step}", self.modules_named(f"mix{step}")(self.flat(x), ctx)).split(sizes, -1)
        factors, bases = self.factor[step].unbind(-1), self.base[step].split(sizes, -1)
        pre, post, comb = (u * factor + base for u, factor, base in zip(mixed, factors, bases, strict=True))
        return pre, 2.0 * torch.sigmoid(post), self.sinkhorn(torch.softmax(comb.unflatten(-1, (s, s)), -1) + self.eps)

    def sinkhorn(self, k: Tensor) -> Tensor:
        """k (…, s, s) > 0 with rows and columns that sum to nearly 1: columns first, then rows and columns in turn."""
        k = k / (k.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            k = k / (k.sum(-1, keepdim=True) + self.eps)
            k = k / (k.sum(-2, keepdim=True) + self.eps)
        return k
