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

from dovetail.core.at import At
from dovetail.core.ctx import Ctx
from dovetail.core.env import Env
from dovetail.core.group import Mask, Mixer, Order
from dovetail.core.module import Linear, Module, wide
from dovetail.core.part import Part, Problem, child, register
from dovetail.core.weight import State, Weight
from dovetail.ops.attend import Rule, attend
from dovetail.ops.form import chunk, readable
from dovetail.ops.mask import dense, pairs


class Early(Mixer):
    """What both have in common: heads, a mask, tokens that are their own values."""

    TAPS = ("q", "pattern", "z", "out")

    heads: int
    mask: Mask

    def axes(self, env: Env) -> Env:
        return env.add(heads=self.heads)

    def children(self) -> dict[str, Part]:
        return {}

    def weights(self, env: Env) -> list[Weight]:
        return [
            Weight(name="o.weight", out=("embed",), inp=("heads", "embed")),
            Weight(name="head_number", out=("heads",), role="const"),
        ]

    def constant(self, name: str, env: Env) -> Tensor:
        return torch.arange(self.heads)

    def remembered(self) -> list[tuple[str, tuple[str, ...]]]:
        """(name, axes) of what a token leaves behind."""
        return [("tokens", ("embed",))]

    def state(self, env: Env) -> list[State]:
        if self.order() == "both" or not env.decodes:
            return []
        bounds = {"window": self.mask.reach(), "keep": self.mask.kept()}
        return [State(name=name, axes=axes, **bounds) for name, axes in self.remembered()]

    def order(self) -> Order:
        return self.mask.order()

    def check(self, env: Env) -> list[Problem]:
        if self.heads < 1:
            return [Problem("heads", f"{self.heads} is not above 0")]
        return [Problem(f"mask.{p.field}", p.problem, p.remedy) for p in self.mask.check(env)]

    def region(self) -> bool:
        return True

    def excepts(self, env: Env) -> dict[str, str]:
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


@register("additive")
class Additive(Early):
    """Scores by a network with one hidden layer."""

    TAPS = ("q", "k", "pattern", "z", "out")

    heads: int = 1
    mask: Mask = child("causal")
    hidden: int | None = None  # None: the width

    def module(self) -> type[Module]:
        return AdditiveModule

    def axes(self, env: Env) -> Env:
        return super().axes(env).add(hidden=env.size("embed") if self.hidden is None else self.hidden)

    def weights(self, env: Env) -> list[Weight]:
        made = [Weight(name=f"{name}.weight", out=("heads", "hidden"), inp=("embed",)) for name in ("q", "k")]
        return [*made, Weight(name="u", batch=("heads",), out=("hidden",), role="gate", init="normal"), *super().weights(env)]

    def remembered(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("keys", ("heads", "hidden")), *super().remembered()]

    def cost(self, env: Env, n: int) -> tuple[int, int]:
        each = 2 * self.heads * (env.size("hidden") + env.size("embed"))
        return each * n * n, each * pairs(self.mask, n)

    def check(self, env: Env) -> list[Problem]:
        if self.hidden is not None and self.hidden < 1:
            return [Problem("hidden", f"{self.hidden} is not above 0")]
        return super().check(env)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "hidden": [10, 7]}


class AdditiveModule(EarlyModule):
    """x (…, n, embed) -> like x."""

    q: Linear
    k: Linear
    u: Tensor

    def setup(self) -> None:
        super().setup()
        self.size = self.env.size("hidden")

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        at, key_at = ctx.at, ctx.at
        q, k = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k))
        q, k = ctx.tap(self, "q", q), ctx.tap(self, "k", k)
        if view is not None:
            (k, x), key_at = view.extend(at, k, x)
        q, k = q.transpose(-3, -2).unsqueeze(-2), k.transpose(-3, -2).unsqueeze(-3)  # (…, heads, n, 1, hidden), (…, 1, m, …)
        seen, empty = dense(self.part.mask, at, key_at, self.head_number)
        # every pair has a hidden layer of its own, so some queries at a time; all at once to be read, or looked at
        some = at.n if readable() or ctx.wants(self, "pattern") else chunk()
        found: list[Tensor] = []
        for begin in range(0, at.n, some):
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
        return flat.to(wide(each.dtype)).view(each.shape[:-1])

    def shown(self, weights: Tensor, ctx: Ctx) -> Tensor:
        """The pattern as listeners leave it."""
        return ctx.tap(self, "pattern", weights) if ctx.wants(self, "pattern") else weights


@register("multiplicative")
class Multiplicative(Early):
    """Scores by a bilinear form of the two tokens: a token leaves nothing behind but itself."""

    heads: int = 1
    mask: Mask = child("causal")
    scale: float = 1.0

    def module(self) -> type[Module]:
        return MultiplicativeModule

    def weights(self, env: Env) -> list[Weight]:
        return [Weight(name="q.weight", out=("heads", "embed"), inp=("embed",)), *super().weights(env)]

    def cost(self, env: Env, n: int) -> tuple[int, int]:
        each = 4 * self.heads * env.size("embed")
        return each * n * n, each * pairs(self.mask, n)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "scale": [0.3, 0.15]}


class MultiplicativeModule(EarlyModule):
    """x (…, n, embed) -> like x."""

    q: Linear

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.part, Multiplicative)
        self.scale = self.part.scale

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        at, key_at = ctx.at, ctx.at
        q = ctx.tap(self, "q", self.q(x).unflatten(-1, (-1, x.shape[-1])))  # x_iᵀ W of each head
        if view is not None:
            (x,), key_at = view.extend(at, x)
        tokens = x.unsqueeze(-2)  # one key head, which is its own value
        return self.finish(self.attend(q, tokens, at, key_at, ctx), ctx)

    def attend(self, q: Tensor, tokens: Tensor, at: At, key_at: At, ctx: Ctx) -> Tensor:
        """The tokens' mean by softmax of the scores: (…, n, heads, embed)."""
        edit: Callable[[Tensor], Tensor] | None = None
        if ctx.wants(self, "pattern"):
            edit = lambda pattern: ctx.tap(self, "pattern", pattern)  # noqa: E731
        rule = Rule(mask=self.part.mask, scale=self.scale, heads=self.head_number, edit=edit)
        return attend(q, tokens, tokens, rule, at, key_at, frozenset() if edit is None else frozenset({"edit"}))
