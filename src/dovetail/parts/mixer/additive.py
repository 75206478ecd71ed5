"""Attention as it began: one token scores another by a small network (2014) or by a bilinear form (2015), with no projections
but the score's own. What is found is the mean of the tokens themselves, weighted by softmax.

    additive         s_ij = uᵀ tanh(W_q x_i + W_k x_j)          Bahdanau et al. 2014
    multiplicative   s_ij = x_iᵀ W x_j · scale                   Luong et al. 2015 (general)
    out = Σ_heads (Σ_j softmax(s_i)_j x_j) W_o

The papers have one head, a decoder's state for x_i and an encoder's for x_j; here both come from one stream, as a mixer's do.

Shapes: x (…, n, embed)   q, k (…, n, heads, hidden)   s (…, heads, n, m)   z (…, n, heads, embed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Mask, Mixer, Order
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Linear, Module, at_least_fp32
from dovetail.core.part import Part, Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight
from dovetail.ops.attend import Scoring, attend
from dovetail.ops.form import chunk, readable
from dovetail.ops.mask import dense, pairs


class Early(Mixer):
    """What both have in common: heads, a mask, tokens that are their own values."""

    TAPS = ("q", "pattern", "z", "out")

    heads: int
    mask: Mask

    def axes(self, scope: Scope) -> Scope:
        return scope.add(heads=self.heads)

    def children(self) -> dict[str, Part]:
        return {}

    def weights(self, scope: Scope) -> list[Weight]:
        return [
            Weight(name="o.weight", out=("embed",), inp=("heads", "embed")),
            Weight(name="head_number", out=("heads",), role="const"),
        ]

    def acts_on(self, field: str) -> tuple[str, ...] | None:
        return ("q", "k", "u") if field in ("mask", "scale") else None

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.heads)

    def remembered(self) -> list[tuple[str, tuple[str, ...]]]:
        """(name, axes) of what a token leaves behind."""
        return [("tokens", ("embed",))]

    def state(self, scope: Scope) -> list[State]:
        if self.order() == "both" or not scope.decodes:
            return []
        bounds = {"window": self.mask.reach(), "keep": self.mask.kept()}
        return [State(name=name, axes=axes, **bounds) for name, axes in self.remembered()]

    def order(self) -> Order:
        return self.mask.order()

    def check(self, scope: Scope) -> list[Problem]:
        if self.heads < 1:
            return [Problem("heads", f"{self.heads} is not above 0")]
        return [Problem(f"mask.{p.field}", p.problem, p.remedy) for p in self.mask.check(scope)]

    def tp_region(self) -> bool:
        return True

    def excepts(self, scope: Scope) -> dict[str, str]:
        if self.order() != "ahead":
            return {}
        return dict.fromkeys(("chunked", "rollback"), f"{self.mask.kind}: an early query sees later keys")

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"heads": [2, 4]}


class EarlyModule(Module):
    """x (…, n, embed) -> like x."""

    part: Early
    o: Linear
    head_number: Tensor

    def setup(self) -> None:
        self.part.mask.key  # noqa: B018  computed here, outside any compiled graph

    def finish(self, z: Tensor, ctx: Ctx) -> Tensor:
        """What was found (…, n, heads, embed), back to the stream."""
        return ctx.tap(self, "out", self.o(ctx.tap(self, "z", z).flatten(-2)))


@register("additive_attention")
class AdditiveAttention(Early):
    """Scores by a network with one hidden layer."""

    TAPS = ("q", "k", "pattern", "z", "out")

    heads: int = 1
    mask: Mask = child("causal")
    hidden: int | None = None  # None: the width

    def module(self) -> type[Module]:
        return AdditiveAttentionModule

    def axes(self, scope: Scope) -> Scope:
        return super().axes(scope).add(hidden=scope.size("embed") if self.hidden is None else self.hidden)

    def weights(self, scope: Scope) -> list[Weight]:
        made = [Weight(name=f"{name}.weight", out=("heads", "hidden"), inp=("embed",)) for name in ("q", "k")]
        return [*made, Weight(name="u", batch=("heads",), out=("hidden",), role="gate", init="normal"), *super().weights(scope)]

    def remembered(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("keys", ("heads", "hidden")), *super().remembered()]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 2 * self.heads * (scope.size("hidden") + scope.size("embed"))
        return each * n * n, each * pairs(self.mask, n)

    def check(self, scope: Scope) -> list[Problem]:
        if self.hidden is not None and self.hidden < 1:
            return [Problem("hidden", f"{self.hidden} is not above 0")]
        return super().check(scope)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "hidden": [10, 7]}


class AdditiveAttentionModule(EarlyModule):
    """x (…, n, embed) -> like x."""

    q: Linear
    k: Linear
    u: Tensor

    def setup(self) -> None:
        super().setup()
        self.size = self.scope.size("hidden")

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        layout, key_layout = ctx.layout, ctx.layout
        q, k = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k))
        q, k = ctx.tap(self, "q", q), ctx.tap(self, "k", k)
        if view is not None:
            (k, x), key_layout = view.extend(layout, k, x)
        q, k = q.transpose(-3, -2).unsqueeze(-2), k.transpose(-3, -2).unsqueeze(-3)  # (…, heads, n, 1, hidden), (…, 1, m, …)
        seen, empty = dense(self.part.mask, layout, key_layout, self.head_number)
        # every pair has a hidden layer of its own, so some queries at a time; all at once to be read, or looked at
        some = layout.n if readable() or ctx.wants(self, "pattern") else chunk()
        found: list[Tensor] = []
        for begin in range(0, layout.n, some):
            here = slice(begin, begin + some)
            scores = self.scores(q[..., here, :, :], k).masked_fill(~seen[..., here, :], -torch.inf)
            shut = empty[..., here, :]
            weights = torch.softmax(scores.masked_fill(shut, 0.0), -1).masked_fill(shut, 0.0)
            found.append(self.shown(weights, ctx).to(x.dtype) @ x.unsqueeze(-3))
        return self.finish(torch.cat(found, -2).transpose(-3, -2), ctx)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(…, heads, n, m)."""
        each = torch.tanh(q + k)
        flat = each.flatten(-3, -2) @ self.u.unsqueeze(-1).to(each.dtype)
        return flat.to(at_least_fp32(each.dtype)).view(each.shape[:-1])

    def shown(self, weights: Tensor, ctx: Ctx) -> Tensor:
        """The pattern as listeners leave it."""
        return ctx.tap(self, "pattern", weights) if ctx.wants(self, "pattern") else weights


@register("multiplicative_attention")
class MultiplicativeAttention(Early):
    """Scores by a bilinear form of the two tokens: a token leaves nothing behind but itself."""

    heads: int = 1
    mask: Mask = child("causal")
    scale: float = 1.0

    def module(self) -> type[Module]:
        return MultiplicativeAttentionModule

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="q.weight", out=("heads", "embed"), inp=("embed",)), *super().weights(scope)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 4 * self.heads * scope.size("embed")
        return each * n * n, each * pairs(self.mask, n)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "scale": [0.3, 0.15]}


class MultiplicativeAttentionModule(EarlyModule):
    """x (…, n, embed) -> like x."""

    q: Linear

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.part, MultiplicativeAttention)
        self.scale = self.part.scale

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        layout, key_layout = ctx.layout, ctx.layout
        q = ctx.tap(self, "q", self.q(x).unflatten(-1, (-1, x.shape[-1])))  # x_iᵀ W of each head
        if view is not None:
            (x,), key_layout = view.extend(layout, x)
        tokens = x.unsqueeze(-2)  # one key head, which is its own value
        return self.finish(self.attend(q, tokens, layout, key_layout, ctx), ctx)

    def attend(self, q: Tensor, tokens: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx) -> Tensor:
        """The tokens' mean by softmax of the scores: (…, n, heads, embed)."""
        edit: Callable[[Tensor], Tensor] | None = None
        if ctx.wants(self, "pattern"):
            edit = lambda pattern: ctx.tap(self, "pattern", pattern)  # noqa: E731
        scoring = Scoring(mask=self.part.mask, scale=self.scale, heads=self.head_number, edit=edit)
        return attend(q, tokens, tokens, scoring, layout, key_layout, frozenset() if edit is None else frozenset({"edit"}))
