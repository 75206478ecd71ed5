"""Latent attention: keys and values of all heads are made from one small vector a token, and only that is remembered.

    c = norm(x W_c)          k_h = [c W_k,h ; turn(x W_r)]          v_h = c W_v,h          q_h = [q'_h ; turn(q''_h)]
    z_h = softmax(q_h k_hᵀ·scale, where the mask allows) v_h                                out = z W_o

c is the latent; x W_r is one short key that all heads share and that alone knows positions. Queries come from x, or from a
latent of their own. Two forms of one result:

    expanded   keys and values are made of the latents, then attention as usual: cheapest for many queries at once
    absorbed   q'_h c W_k,h = (q'_h W_k,hᵀ) c: queries look at the latents themselves, as if at one key head that is its own
               value, and W_v,h comes after: cheapest for a few queries over much that is remembered

Shapes: x (…, n, embed)   c (…, m, kv_rank)   x W_r (…, m, rope)   q, k (…, n, heads, nope + rope)   v, z (…, n, heads, value).
DeepSeek-AI 2024 (V2, V3). Latents are whole on every tensor-parallel rank; heads are shared out.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Mask, Mixer, Norm, Order, Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Linear, Module
from dovetail.core.part import Part, Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight
from dovetail.ops.attend import Scoring, attend
from dovetail.ops.form import readable
from dovetail.ops.mask import pairs


@register("mla")
class MLA(Mixer):
    """Multi-head latent attention: a token is remembered by kv_rank + rope numbers, however many heads there are."""

    TAPS = ("q", "mla", "turned", "pattern", "z", "out")

    heads: int = 8
    kv_rank: int = 512  # numbers of the latent
    q_rank: int | None = None  # of the queries' own latent; None: straight from the stream
    nope: int = 128  # channels of a query and key head that know no position
    rope: int = 64  # and those that do
    value: int = 128  # channels of a value head
    mask: Mask = child("causal")
    position: Position = child("rope")
    norm: Norm = child("rmsnorm")  # of the latents
    scale: float | None = None  # None: 1/√(nope + rope)
    dropout: float = 0.0

    def module(self) -> type[Module]:
        return MLAModule

    def axes(self, scope: Scope) -> Scope:
        sizes = {"heads": self.heads, "nope": self.nope, "rope": self.rope, "value": self.value, "kv_rank": self.kv_rank}
        if self.q_rank is not None:
            sizes["q_rank"] = self.q_rank
        return scope.add(**sizes, asked=self.nope + self.rope)

    def children(self) -> dict[str, Part]:
        norms = {"kv_norm": self.norm} if self.q_rank is None else {"q_norm": self.norm, "kv_norm": self.norm}
        return {"position": self.position, **norms}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        if child != "position":
            return scope.bind(dim="q_rank" if child == "q_norm" else "kv_rank")
        remembered = self.state(scope)
        if remembered and remembered[0].window is not None:  # a position may count inside a memory that does not grow
            scope = scope.add(cache=remembered[0].keep + remembered[0].window, kept=remembered[0].keep)
        return dc.replace(scope.add(head=self.rope).bind(dim="head"), decodes=bool(remembered))

    def weights(self, scope: Scope) -> list[Weight]:
        x, latent = ("embed",), ("kv_rank",)
        declared: list[Weight] = []
        if self.q_rank is not None:
            declared += [Weight(name="q_down.weight", out=("q_rank",), inp=x, tp="replicate")]
        return [
            *declared,
            Weight(name="q.weight", out=("heads", "asked"), inp=x if self.q_rank is None else ("q_rank",)),
            Weight(name="kv_down.weight", out=latent, inp=x, tp="replicate"),
            Weight(name="turned.weight", out=("rope",), inp=x, tp="replicate"),
            Weight(name="k_up.weight", out=("heads", "nope"), inp=latent),
            Weight(name="v_up.weight", out=("heads", "value"), inp=latent),
            Weight(name="o.weight", out=x, inp=("heads", "value")),
            Weight(name="head_number", out=("heads",), role="const"),
        ]

    def acts_on(self, field: str) -> tuple[str, ...] | None:
        if field == "position":
            return ("q", "turned")
        return ("q", "k_up", "turned") if field in ("mask", "scale") else None

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.heads)

    def state(self, scope: Scope) -> list[State]:
        if self.order() == "both" or not scope.decodes:
            return []
        bounds = {"window": self.mask.reach(), "keep": self.mask.kept()}
        return [State(name="mla", axes=("kv_rank",), **bounds), State(name="turned", axes=("rope",), **bounds)]

    def order(self) -> Order:
        return self.mask.order()

    def needs(self) -> frozenset[str]:
        return self.position.needs()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 2 * self.heads * (self.nope + self.rope + self.value)
        return each * n * n, each * pairs(self.mask, n)

    def check(self, scope: Scope) -> list[Problem]:
        sizes = {name: getattr(self, name) for name in ("heads", "kv_rank", "q_rank", "nope", "rope", "value")}
        for name, size in sizes.items():
            if size is not None and size < 1:
                return [Problem(name, f"{size} is not above 0")]
        if self.position.site == "stream":
            what = f"{self.position.kind} acts on the stream, not in a mixer"
            return [Problem("position", what, "put it in the model's `position`, or use swap")]
        found = [] if 0 <= self.dropout < 1 else [Problem("dropout", f"{self.dropout} is not in [0, 1)")]
        return found + [Problem(f"mask.{p.field}", p.problem, p.remedy) for p in self.mask.check(scope)]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        whole, kept = self.heads * (self.nope + self.rope + self.value), self.kv_rank + self.rope
        if kept < whole:
            return []
        what = f"a latent and its turned key are {kept} numbers a token, no fewer than the {whole} of all keys and values"
        return [Problem("kv_rank", what, "make it smaller, or use attention")]

    def tp_region(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {
            "heads": [6, 4],
            "kv_rank": [10, 5],
            "q_rank": [None, 14],
            "nope": [9, 6],
            "rope": [12, 8],
            "value": [7, 11],
            "scale": [None, 0.4],
            "dropout": [0.0, 0.2],
        }

    def excepts(self, scope: Scope) -> dict[str, str]:
        if self.order() != "ahead":
            return {}
        return dict.fromkeys(("chunked", "rollback"), f"{self.mask.kind}: an early query sees later keys")


class MLAModule(Module):
    """x (…, n, embed) -> like x."""

    part: MLA
    q_down: Linear
    q: Linear
    kv_down: Linear
    turned: Linear
    k_up: Linear
    v_up: Linear
    o: Linear
    head_number: Tensor
    position: PositionModule
    q_norm: Module
    kv_norm: Module

    def setup(self) -> None:
        part = self.part
        self.asked = part.nope + part.rope
        self.scale = self.asked**-0.5 if part.scale is None else part.scale
        self.needs = part.needs()
        self.biased = "bias" in self.needs
        part.mask.key  # noqa: B018  computed here, outside any compiled graph

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        layout, key_layout = ctx.layout, ctx.layout
        latent = ctx.tap(self, "mla", self.kv_norm(self.kv_down(x), ctx))
        turned = ctx.tap(self, "turned", self.position.on_write(self.turned(x).unsqueeze(-2), layout).squeeze(-2))
        if view is not None:
            (latent, turned), key_layout = view.extend(layout, latent, turned)
        turned = self.position.on_read(turned.unsqueeze(-2), key_layout)
        form = self.absorbed if self.absorbing(layout.n, key_layout.n) else self.expanded
        z = form(self.queries(x, ctx), latent, turned, layout, key_layout, ctx)
        return ctx.tap(self, "out", self.o(ctx.tap(self, "z", z).flatten(-2)))

    def queries(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, heads, nope + rope)."""
        if self.part.q_rank is not None:
            x = self.q_norm(self.q_down(x), ctx)
        still, turning = self.q(x).unflatten(-1, (-1, self.asked)).split([self.part.nope, self.part.rope], -1)
        return ctx.tap(self, "q", torch.cat([still, self.position.rotate(turning, ctx.layout)], -1))

    def absorbing(self, n: int, m: int) -> bool:
        """Whether n queries over m tokens cost fewer products when they look at the latents themselves."""
        rank, up = self.part.kv_rank, self.part.nope + self.part.value
        return not readable() and n * (up * rank + m * 2 * rank) < m * (up * rank + n * up)

    def expanded(
        self, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
    ) -> Tensor:
        """z (…, n, heads, value): every head's keys and values are made of the latents (…, m, kv_rank)."""
        k = self.k_up(latent).unflatten(-1, (-1, self.part.nope))
        v = self.v_up(latent).unflatten(-1, (-1, self.part.value))
        k = torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1)
        return self.attend(q, k, v, layout, key_layout, ctx)

    def absorbed(
        self, q: Tensor, latent: Tensor, turned: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx
    ) -> Tensor:
        """The same: W_k goes into the queries, W_v is left for what they find; no key is made."""
        still, turning = q[..., : self.part.nope], q[..., self.part.nope :]
        k_up = self.k_up.weight.unflatten(0, (-1, self.part.nope))  # (heads, nope, kv_rank)
        v_up = self.v_up.weight.unflatten(0, (-1, self.part.value))  # (heads, value, kv_rank)
        q = torch.cat([torch.einsum("...hi,hir->...hr", still, k_up), turning], -1)
        shared = latent.unsqueeze(-2)
        found = self.attend(q, torch.cat([shared, turned], -1), shared, layout, key_layout, ctx)
        return torch.einsum("...hr,hor->...ho", found, v_up)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, key_layout: TokenLayout, ctx: Ctx) -> Tensor:
        """Softmax attention by this part's mask and position."""
        edit = self.edit(ctx)
        scoring = Scoring(
            mask=self.part.mask,
            scale=self.scale,
            heads=self.head_number,
            bias=self.position.score if self.biased else None,
            tables=self.position.tables() if self.biased else (),
            edit=edit,
        )
        return attend(q, k, v, scoring, layout, key_layout, self.needs if edit is None else self.needs | {"edit"})

    def edit(self, ctx: Ctx) -> Callable[[Tensor], Tensor] | None:
        """What happens to the pattern itself: a listener, dropout in training, or nothing."""
        heard, dropped = ctx.wants(self, "pattern"), ctx.training and self.part.dropout > 0
        if not heard and not dropped:
            return None
        return lambda pattern: ctx.dropout(ctx.tap(self, "pattern", pattern), self.part.dropout, self, "pattern")
