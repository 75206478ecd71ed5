"""Native sparse attention: each query reads a summary of the text, the few blocks of it that matter, and what is near.

    summary    z_c = Σ_b p_b ṽ_b            p = softmax(q k̃ᵀ·scale) over blocks that are whole       k̃_b = φ(k of block b)
    selected   z_s = softmax(q kᵀ·scale) v   over the first block, the query's own, and the `top` others of largest Σ_heads p_b
    near       z_w = softmax(q kᵀ·scale) v   over the last `window` tokens
    out = (g_c ∘ z_c + g_s ∘ z_s + g_w ∘ z_w) W_o          g = σ(x W_g), three numbers a head

φ(k₁ … k_size) = W_out silu(W_in [k₁ + e₁; …; k_size + e_size]): a small map of its own for keys and for values, which knows
each token's place in the block. Heads that share keys pick the same blocks, so that each is fetched once. Picking has no
gradient: what a block is worth is learned by the summary. Here the summary's blocks are the selected ones, and the three ways
share one k and v; a token leaves 2 entries behind, and a whole block 2 more.

Shapes: x (…, n, embed)   q, z (…, n, heads, head)   k, v (…, m, kv_heads, head)   k̃, ṽ (…, blocks, kv_heads, head).
Yuan et al. 2025.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Mask, Mixer, Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Linear, Module
from dovetail.core.part import KINDS, Part, Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight
from dovetail.ops.attend import Scoring, attend
from dovetail.ops.blocks import attend_picked, ended, log_softmax_where
from dovetail.ops.mask import pairs, same_document

WAYS = 3  # summary, selected, near
ALWAYS = 2  # blocks that are read without being picked: the first and the query's own
# a block's rank as a whole number: its worth in steps of 1 ÷ FINE down to −LOWEST, then its number
FINE, LOWEST, MOST_BLOCKS, NEVER = 2.0**16, 2.0**20, 2**24, -(2**62)


@register("nsa")
class NSA(Mixer):
    """Attention to a summary, to blocks picked by content, and to a window."""

    TAPS = ("q", "k", "v", "summary", "picked", "gate", "z", "out")

    heads: int = 8
    kv_heads: int | None = 2  # None: as many as heads
    head: int | None = None  # None: width / heads
    block: int = 32  # tokens
    top: int = 14  # blocks picked by content
    window: int = 512  # tokens, itself counted
    position: Position = child("rope")

    def module(self) -> type[Module]:
        return NSAModule

    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    def near(self) -> Any:
        """The mask of the window."""
        window: Any = KINDS["window"]
        causal: Any = KINDS["causal"]
        return causal() & window(size=self.window)

    def axes(self, scope: Scope) -> Scope:
        head = self.head or scope.size("embed") // max(self.heads, 1)
        return scope.add(heads=self.heads, kv_heads=self.groups(), head=head, block=self.block, ways=WAYS)

    def children(self) -> dict[str, Part]:
        return {"position": self.position}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return dc.replace(scope.bind(dim="head"), decodes=bool(self.state(scope)))

    def weights(self, scope: Scope) -> list[Weight]:
        x, q, kv = ("embed",), ("heads", "head"), ("kv_heads", "head")
        made = {"q": q, "k": kv, "v": kv, "gate": ("heads", "ways")}
        declared = [Weight(name=f"{name}.weight", out=out, inp=x) for name, out in made.items()]
        declared += [Weight(name="o.weight", out=x, inp=q)]
        for name in ("k", "v"):  # a convolution as wide as its step, whose work goes by blocks: `cost` counts it
            declared += [
                Weight(name=f"{name}_place", out=("block", "head"), role="embed", tp="replicate"),
                Weight(name=f"{name}_in", out=("head",), inp=("block", "head"), role="conv", tp="replicate"),
                Weight(name=f"{name}_out", out=("head",), inp=("head",), role="conv", tp="replicate"),
            ]
        return [*declared, Weight(name="head_number", out=("heads",), role="const")]

    def acts_on(self, field: str) -> tuple[str, ...] | None:
        return ("q", "k", "k_place", "k_in", "k_out") if field == "position" else None

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.arange(self.heads)

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        axes = ("kv_heads", "head")
        return [
            State(name="kv", axes=axes, copies=2),
            State(name="summary", axes=axes, copies=2, per="block", block=self.block),
        ]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        head, size, blocks = scope.size("head"), self.block, n // self.block
        each, left = 4 * self.heads * head, n - blocks * size
        mapped = 4 * blocks * self.groups() * head * head * (size + 1)
        # the last token of a block is the first to see it whole
        whole = size * blocks * (blocks - 1) // 2 + blocks * (left + 1)
        own = blocks * (size * (size + 1) // 2) + left * (left + 1) // 2
        others = sum(size * min(b, self.top + 1) * (size if b < blocks else left) for b in range(blocks + 1))
        return mapped + each * n * (blocks + 2 * n), mapped + each * (whole + own + others + pairs(self.near(), n))

    def check(self, scope: Scope) -> list[Problem]:
        if self.heads < 1 or self.groups() < 1 or self.heads % self.groups():
            return [
                Problem("kv_heads", f"{self.groups()} does not divide {self.heads} heads", "or use null: one for each head")
            ]
        if self.head is None and scope.size("embed") % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the width, {scope.size('embed')}", "or set `head`")]
        for name, value in (("block", self.block), ("top", self.top), ("window", self.window)):
            if value < 1:
                return [Problem(name, f"{value} is below 1")]
        if scope.sizes.get("coords", 1) != 1:
            return [
                Problem("", "blocks are cut from a row of tokens, not from an image", "use attention, with blocks for a mask")
            ]
        if self.position.site == "stream" or self.position.needs():
            what = f"{self.position.kind} does not act on queries and keys themselves"
            return [Problem("position", what, "use rope or none")]
        return []

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        reads = (self.top + ALWAYS) * self.block
        if length is None or length > reads:
            return []
        return [Problem("top", f"{reads} tokens are selected of {length}: all of them", "use attention, or longer texts")]

    def tp_region(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {
            "heads": [6, 4],
            "kv_heads": [2, None, 1],
            "head": [12],
            "block": [4, 3],
            "top": [1, 2],
            "window": [5, 8],
        }


class NSAModule(Module):
    """x (…, n, embed) -> like x."""

    part: NSA
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    head_number: Tensor
    position: PositionModule

    def setup(self) -> None:
        self.size, self.block = self.scope.size("head"), self.part.block
        self.shared = self.part.heads // self.part.groups()
        self.scale = self.size**-0.5
        self.near: Mask = self.part.near()
        self.near.key  # noqa: B018  computed here, outside any compiled graph

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        layout, key_layout = ctx.layout, ctx.layout
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        k, v = ctx.tap(self, "k", self.position.on_write(k, layout)), ctx.tap(self, "v", v)
        if view is not None:
            (k, v), key_layout = view.extend(layout, k, v)
        k = self.position.on_read(k, key_layout)
        q = ctx.tap(self, "q", self.position.rotate(q, layout))
        found = ended(layout, key_layout, self.block)
        (short_k, short_v), block_at = (self.mapped("k", k, found.tokens), self.mapped("v", v, found.tokens)), found.layout
        if view is not None:
            (short_k, short_v), block_at = view.extend_blocks(block_at, short_k, short_v)
        summary, logs = self.summary(q, short_k, short_v, layout, block_at)
        picked = ctx.tap(self, "picked", self.pick(self.over_group(logs, ctx), layout, block_at))
        selected = attend_picked(q, k, v, picked, self.block, self.scale, layout, key_layout)
        near = attend(
            q, k, v, Scoring(mask=self.near, scale=self.scale, heads=self.head_number), layout, key_layout, frozenset()
        )
        gate = ctx.tap(self, "gate", torch.sigmoid(self.gate(x)).unflatten(-1, (-1, WAYS)))
        z = torch.stack([ctx.tap(self, "summary", summary), selected, near], -1)
        z = ctx.tap(self, "z", (z * gate.unsqueeze(-2)).sum(-1))
        return ctx.tap(self, "out", self.o(z.flatten(-2)))

    def mapped(self, name: str, x: Tensor, tokens: Tensor) -> Tensor:
        """φ: one key or value (…, blocks, kv_heads, head) for the tokens (…, blocks, block) of x (…, m, kv_heads, head)."""
        place, inward, outward = (getattr(self, f"{name}_{which}") for which in ("place", "in", "out"))
        index = tokens.flatten(-2)[..., None, None].expand(*tokens.shape[:-2], -1, *x.shape[-2:])
        pieces = x.gather(-3, index).unflatten(-3, tokens.shape[-2:]).transpose(-3, -2)  # (…, blocks, kv_heads, block, head)
        return F.linear(F.silu(F.linear((pieces + place.view(-1, self.size)).flatten(-2), inward)), outward)

    def summary(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, blocks: TokenLayout) -> tuple[Tensor, Tensor]:
        """z_c (…, n, heads, head), and the logarithms of each whole block's weights (…, kv_heads, shared, n, blocks)."""
        whole = same_document(layout, blocks) & (blocks.order[..., None, :] < ((layout.order + 1) // self.block)[..., :, None])
        grouped = q.unflatten(-2, (k.shape[-2], -1)).movedim(-4, -2)  # (…, kv_heads, shared, n, head)
        keys, values = (x.transpose(-3, -2).unsqueeze(-3) for x in (k, v))
        logs = log_softmax_where(grouped @ keys.transpose(-1, -2) * self.scale, whole[..., None, None, :, :])
        z = (logs.exp().to(v.dtype) @ values).movedim(-2, -4).flatten(-3, -2)
        return z, logs.detach()

    def over_group(self, logs: Tensor, ctx: Ctx) -> Tensor:
        """What a block is worth to a group (…, kv_heads, n, blocks): its weight summed over all heads, some of which may be on
        other ranks. The logarithm of the sum, as blocks far below the best would all be worth 0, and tie."""
        here = logs.shape[-3]
        if here == self.shared:
            return logs.logsumexp(-3)
        everywhere = logs.new_zeros(*logs.shape[:-4], self.part.heads, *logs.shape[-2:])
        logs = ctx.all_reduce(everywhere.index_add(-3, self.head_number, logs.flatten(-4, -3)), ("heads",))
        return logs.unflatten(-3, (-1, self.shared)).logsumexp(-3).index_select(-3, self.head_number[::here] // self.shared)

    def pick(self, worth: Tensor, layout: TokenLayout, blocks: TokenLayout) -> Tensor:
        """The blocks (…, kv_heads, n, top + 2) that each query reads, by number, −1 for none: its own, the first, the best."""
        own, number = layout.order // self.block, blocks.order[..., None, :]
        others = same_document(layout, blocks) & (number > 0) & (number < own[..., None])
        # two heads that each want one block make both worth 1: what is that near is equal, and the earlier block is taken
        rank = (worth.clamp_min(-LOWEST) * FINE).round().long() * MOST_BLOCKS - number[..., None, :, :]
        best, column = rank.masked_fill(~others[..., None, :, :], NEVER).topk(min(self.part.top, blocks.n), -1)
        numbers = number.unsqueeze(-3).expand_as(worth).gather(-1, column)
        always = torch.stack([own, torch.where(own > 0, 0, -1)], -1)[..., None, :, :].expand(*worth.shape[:-1], ALWAYS)
        return torch.cat([always, torch.where(best > NEVER, numbers, -1)], -1)
