"""Wires: where a block's norms are, and how its branches join the residual stream. The default, `pre_norm`, is in nn/block.py.

    post_norm      norm(x + f x)                                                     Vaswani et al. 2017
    sandwich_norm  x + norm(f(norm x))                                               Ding et al. 2021 (CogView), Gemma 2
    res_post_norm  x + norm(f x)                                                     Liu et al. 2021 (Swin v2), OLMo 2
    parallel       x + f(norm x) + g(norm x), with one norm or one per branch        Wang & Komatsuzaki 2021 (GPT-J)

Shapes: x (…, n, embed). f and g are the branches: mixer, cross attention, ffn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from dovetail.nn.block import Branching, Scaled, ScaledProof, WireModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Steps
from dovetail.spec.part import Problem, register
from dovetail.spec.scope import Scope


@register("post_norm")
class PostNorm(Scaled):
    """Post-norm: norm(x + f x) (Vaswani et al. 2017)."""

    sums: ClassVar[bool] = False

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{step[0]}_norm" for step in steps)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if scope.depth < 12:
            return []
        return [Problem("", f"{scope.depth} layers of post-norm train badly without warm-up", "warm up, or wire: pre_norm")]


class PostNormModule(WireModule, of=PostNorm):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for step in block.steps:
            y = x + self.sum(block, step, x, ctx, views)
            x = ctx.tap(block, f"after_{step[0]}", block.normed(f"{step[0]}_norm", y, ctx))
        return x


@register("sandwich_norm")
class SandwichNorm(Scaled):
    """Sandwich norm: x + norm(f(norm x)) (Gemma 2); every branch has two norms of its own."""

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{name}_{which}" for step in steps for name in step for which in ("norm", "post_norm"))


class SandwichNormModule(WireModule, of=SandwichNorm):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for step in block.steps:
            out = x
            for name in step:
                y = block.branch(name, block.normed(f"{name}_norm", x, ctx), ctx, views)
                out = out + self.added(block.normed(f"{name}_post_norm", y, ctx), block, name, ctx)
            x = ctx.tap(block, f"after_{step[0]}", out)
        return x


@register("res_post_norm")
class ResPostNorm(Scaled):
    """Res-post-norm: x + norm(f x) (Swin v2, OLMo 2); every branch has a norm of its own."""

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{name}_norm" for step in steps for name in step)


class ResPostNormModule(WireModule, of=ResPostNorm):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for step in block.steps:
            out = x
            for name in step:
                y = block.normed(f"{name}_norm", block.branch(name, x, ctx, views), ctx)
                out = out + self.added(y, block, name, ctx)
            x = ctx.tap(block, f"after_{step[0]}", out)
        return x


@register("parallel")
class Parallel(Scaled):
    """Parallel branches: x + f(norm x) + g(norm x) (GPT-J, PaLM; GPT-NeoX with one norm per branch)."""

    one_norm: bool = True

    counts_norms = frozenset({"one_norm"})

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return ("norm",) if self.one_norm else tuple(f"{step[0]}_norm" for step in steps)


class ParallelProof(ScaledProof, of=Parallel):
    """Sampled values."""

    samples = {**ScaledProof.samples, "one_norm": [True, False]}


class ParallelModule(WireModule, of=Parallel):
    """x (…, n, embed) -> like x."""

    def setup(self) -> None:
        assert isinstance(self.part, Parallel)
        self.one_norm = self.part.one_norm

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        out, shared = x, block.normed("norm", x, ctx) if self.one_norm else x
        for step in block.steps:
            h = shared if self.one_norm else block.normed(f"{step[0]}_norm", x, ctx)
            out = ctx.tap(block, f"after_{step[0]}", out + self.sum(block, step, h, ctx, views))
        return out
