"""Linformer: keys and values of a whole text are mixed down to `rank` of them, so that attention costs n·rank.

    k̃_r = Σ_j E_jr k_j          ṽ_r = Σ_j F_jr v_j          z = softmax(q k̃ᵀ/√head) ṽ          E, F (length, rank)

j is a token's place in its document. Every output depends on every token, later ones too: this is for encoders. Each document
of a pack is mixed down by itself. A text may be as long as the tables.

Shapes: x (…, n, embed)   q, z (…, n, heads, head)   k̃, ṽ (…, documents · rank, heads, head).            Wang et al. 2020
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import StateError
from dovetail.core.group import Mask, Mixer, Order
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Linear, Module
from dovetail.core.part import KINDS, Part, Problem, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight
from dovetail.ops.attend import Scoring, attend


@register("linformer")
class Linformer(Mixer):
    """Attention of low rank, in both directions."""

    TAPS = ("q", "k", "v", "z", "out")

    heads: int = 8
    head: int | None = None  # None: width / heads
    rank: int = 256
    length: int = 4096  # tokens a text may have

    def module(self) -> type[Module]:
        return LinformerModule

    def axes(self, scope: Scope) -> Scope:
        head = self.head or scope.size("embed") // max(self.heads, 1)
        return scope.add(heads=self.heads, head=head, rank=self.rank, position=self.length)

    def children(self) -> dict[str, Part]:
        return {}

    def weights(self, scope: Scope) -> list[Weight]:
        x, inner = ("embed",), ("heads", "head")
        declared = [Weight(name=f"{name}.weight", out=inner, inp=x) for name in ("q", "k", "v")]
        # tables, a row for each place: every head is mixed down alike
        tables = [
            Weight(name=name, out=("position",), inp=("rank",), role="embed", tp="replicate") for name in ("k_map", "v_map")
        ]
        declared += [*tables, Weight(name="o.weight", out=x, inp=inner)]
        return [*declared, Weight(name="head_number", out=("heads",), role="const")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.heads)

    def order(self) -> Order:
        return "both"

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = 8 * n * self.rank * scope.size("heads", "head")  # mixing down two, scoring, summing up
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        for name, value in (("heads", self.heads), ("rank", self.rank), ("length", self.length)):
            if value < 1:
                return [Problem(name, f"{value} is not above 0")]
        if self.head is None and scope.size("embed") % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the width, {scope.size('embed')}", "or set `head`")]
        return []

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if length is None:
            return []
        if length > self.length:
            what = f"a text of {length} tokens is longer than the tables of {self.length}"
            return [Problem("length", what, "raise it, or use attention")]
        if length <= self.rank:
            what = f"{length} tokens are mixed to {self.rank}, which is no fewer"
            return [Problem("rank", what, "lower it, or use attention")]
        return []

    def tp_region(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"heads": [6, 4], "head": [12], "rank": [3, 5], "length": [45, 50]}


class LinformerModule(Module):
    """x (…, n, embed) -> like x."""

    part: Linformer
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    k_map: Tensor
    v_map: Tensor
    head_number: Tensor

    def setup(self) -> None:
        full: Any = KINDS["full"]
        self.size, self.mask = self.scope.size("head"), full()
        assert isinstance(self.mask, Mask)
        self.mask.key  # noqa: B018  computed here, outside any compiled graph

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        layout, key_layout = ctx.layout, ctx.layout
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        q, k, v = ctx.tap(self, "q", q), ctx.tap(self, "k", k), ctx.tap(self, "v", v)
        if view is not None:
            (k, v), key_layout = view.extend(layout, k, v)
        key_layout.once(f"fits {self.part.length}", lambda: self.refuse_beyond(key_layout))
        documents = key_layout.once("documents", lambda: documents_of(key_layout))
        mixed_at = key_layout.once(("mixed", self.part.rank), lambda: self.places(key_layout, documents))
        k, v = self.mixed(k, self.k_map, key_layout, documents), self.mixed(v, self.v_map, key_layout, documents)
        scoring = Scoring(mask=self.mask, scale=self.size**-0.5, heads=self.head_number)
        z = attend(q, k, v, scoring, layout, mixed_at, frozenset())
        return ctx.tap(self, "out", self.o(ctx.tap(self, "z", z).flatten(-2)))

    def mixed(self, x: Tensor, table: Tensor, layout: TokenLayout, documents: int) -> Tensor:
        """(…, documents · rank, heads, head) from (…, m, heads, head)."""
        share = F.embedding(layout.order, table)  # (…, m, rank)
        if layout.start is None:  # to its own document alone, and none of padding
            which = layout.seg if layout.row is None else layout.row
            own = (which[..., None] == torch.arange(documents, device=x.device)) & layout.real[..., None]
            share = (own[..., None] * share.unsqueeze(-2)).flatten(-2)
        return (share.transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])

    def places(self, layout: TokenLayout, documents: int) -> TokenLayout:
        """Where the mixed keys stand: `rank` of them in each document."""
        device, rank = layout.order.device, self.part.rank
        if layout.start is not None:
            return TokenLayout.whole(layout.order.shape[0], rank, device)
        document = torch.arange(documents, device=device).repeat_interleave(rank)
        order = torch.arange(rank, device=device).repeat(documents)
        if layout.row is not None:
            return TokenLayout.of(order, torch.zeros_like(order), document)
        return TokenLayout.of(order.expand(*layout.order.shape[:-1], -1), document.expand(*layout.order.shape[:-1], -1))

    def refuse_beyond(self, layout: TokenLayout) -> bool:
        """An error where a token stands past the tables; not looked at inside a compiled graph."""
        if torch.compiler.is_compiling() and layout.start is None:
            return True
        longest = int(layout.order.max()) + 1 if layout.start is None else layout.start + layout.n
        if longest > self.part.length:
            raise StateError(
                f"{self.path}: a token stands at position {longest - 1}, but the tables end at {self.part.length - 1}"
                " (shorten the text, or give `linformer` a larger length)"
            )
        return True


def documents_of(layout: TokenLayout) -> int:
    """How many documents a row has at most; in a flat batch, how many rows there are."""
    if layout.start is not None:
        return 1
    return int((layout.seg if layout.row is None else layout.row).max()) + 1
