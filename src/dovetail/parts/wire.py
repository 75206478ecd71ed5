"""Ways to join branches to the stream, beside the usual one, which is `pre` in model.py.

    post       norm(x + f x)              sandwich   x + norm(f(norm x))            x (…, n, embed), f and g mixers or ffns
    branch     x + norm(f x)              parallel   x + f(norm x) + g(norm x), with one norm or one for each

Vaswani et al. 2017 (post); Wang & Komatsuzaki 2021 (parallel).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.module import Module
from dovetail.core.part import Problem, register
from dovetail.core.scope import Scope
from dovetail.core.wire import Branching, Scaled, WireModule


@register("post")
class Post(Scaled):
    """norm(x + f x), the wire of 2017."""

    sums: ClassVar[bool] = False

    def module(self) -> type[Module]:
        return PostModule

    def norms(self, branches: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}_norm" for name in branches)

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if scope.depth < 12:
            return []
        return [Problem("", f"{scope.depth} layers of post-norm train badly without warm-up", "warm up, or wire: pre")]


class PostModule(WireModule):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for name in block.branches:
            y = block.branch(name, x, ctx, views)
            x = ctx.tap(block, f"after_{name}", block.normed(f"{name}_norm", x + self.added(y, block, name, ctx), ctx))
        return x


@register("sandwich")
class Sandwich(Scaled):
    """x + norm(f(norm x)) (Gemma 2)."""

    def module(self) -> type[Module]:
        return SandwichModule

    def norms(self, branches: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}_{which}" for name in branches for which in ("norm", "post_norm"))


class SandwichModule(WireModule):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for name in block.branches:
            y = block.branch(name, block.normed(f"{name}_norm", x, ctx), ctx, views)
            y = block.normed(f"{name}_post_norm", y, ctx)
            x = ctx.tap(block, f"after_{name}", x + self.added(y, block, name, ctx))
        return x


@register("branch")
class Branch(Scaled):
    """x + norm(f x) (OLMo 2)."""

    def module(self) -> type[Module]:
        return BranchModule

    def norms(self, branches: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}_norm" for name in branches)


class BranchModule(WireModule):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for name in block.branches:
            y = block.normed(f"{name}_norm", block.branch(name, x, ctx, views), ctx)
            x = ctx.tap(block, f"after_{name}", x + self.added(y, block, name, ctx))
        return x


@register("parallel")
class Parallel(Scaled):
    """x + f(norm x) + g(norm x): all branches read the same stream (GPT-J, PaLM; NeoX with a norm for each)."""

    one_norm: bool = True

    def module(self) -> type[Module]:
        return ParallelModule

    def norms(self, branches: tuple[str, ...]) -> tuple[str, ...]:
        return ("norm",) if self.one_norm else tuple(f"{name}_norm" for name in branches)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "one_norm": [True, False]}


class ParallelModule(WireModule):
    """x (…, n, embed) -> like x."""

    def setup(self) -> None:
        assert isinstance(self.part, Parallel)
        self.one_norm = self.part.one_norm

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        out, shared = x, block.normed("norm", x, ctx) if self.one_norm else x
        for name in block.branches:
            h = shared if self.one_norm else block.normed(f"{name}_norm", x, ctx)
            out = out + self.added(block.branch(name, h, ctx, views), block, name, ctx)
            out = ctx.tap(block, f"after_{name}", out)
        return out
