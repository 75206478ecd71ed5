"""Native sparse attention (NSA): each query attends to compressed blocks, to a few selected blocks, and to a sliding window.

    compressed  z_c = Σ_b p_b ṽ_b             p = softmax(q k̃ᵀ·scale) over complete blocks          k̃_b = φ(keys of block b)
    selected    z_s = softmax(q kᵀ·scale) v   over the first block, the query's own, and the `top` others of largest Σ_heads p_b
    window      z_w = softmax(q kᵀ·scale) v   over the last `window` tokens
    out = (g_c ∘ z_c + g_s ∘ z_s + g_w ∘ z_w) W_o          g = σ(x W_g), three gates per head

φ(k₁ … k_size) = W_out silu(W_in [k₁ + e₁; …; k_size + e_size]) is one MLP for keys and one for values, with an embedding per
place in the block. Query heads of one KV head select the same blocks, so that each block is fetched once. The selection has no
gradient: the compressed branch learns the worth of a block. Compressed and selected blocks are the same blocks here, and the
three branches share k and v. The cache holds k and v per token and per complete block.

Shapes: x (…, n, embed)   q, z (…, n, heads, head)   k, v (…, m, kv_heads, head)   k̃, ṽ (…, blocks, kv_heads, head).
Yuan et al. 2025.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask, Position
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.nn.softmax import SoftmaxMixer, SoftmaxMixerProof, SoftmaxModule, check_heads, head_size
from dovetail.nn.view import KVView
from dovetail.ops.attend import WHOLE, attend
from dovetail.ops.blocks import attend_picked, ended, log_softmax_where
from dovetail.ops.mask import pairs, same_document
from dovetail.spec.field import bounded
from dovetail.spec.part import KINDS, Part, Problem, broken, child, register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

WAYS = 3  # compressed, selected, window
ALWAYS = 2  # blocks that are always selected: the first and the query's own
# a block's rank as an integer: the log of its probability in steps of 1 / FINE down to −LOWEST, then its number
FINE, LOWEST, MOST_BLOCKS, NEVER = 2.0**16, 2.0**20, 2**24, -(2**62)


@register("nsa")
class NSA(SoftmaxMixer):
    """Native sparse attention: compressed blocks, blocks selected by content, and a sliding window."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos kv_head channel",
        "v": "pos kv_head channel",
        "keys": "key kv_head channel",
        "values": "key kv_head channel",
        "block_k": "block kv_head channel",
        "block_v": "block kv_head channel",
        "summary": "pos head channel",
        "picked": "kv_head pos choice",
        "gate": "pos head way",
        "z": "pos head channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    kv_heads: int | None = bounded(2, above=0, widens=True)  # None: as many as heads
    head: int | None = bounded(None, above=0)  # None: width / heads
    block: int = bounded(32, above=0)  # tokens
    top: int = bounded(14, above=0)  # blocks selected by content
    window: int = bounded(512, above=0)  # tokens, the query's own included
    position: Position = child("rope")

    def groups(self) -> int:
        """The number of KV heads."""
        return self.kv_heads or self.heads

    def visibility(self) -> Mask:
        """The mask of the sliding window."""
        window: Any = KINDS["window"]
        causal: Any = KINDS["causal"]
        return causal() & window(size=self.window)

    def axes(self, scope: Scope) -> Scope:
        head = head_size(self.heads, self.head, scope)
        return scope.add(heads=self.heads, kv_heads=self.groups(), head=head, block=self.block, ways=WAYS)

    def children(self) -> dict[str, Part]:
        return {"position": self.position}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return self.position_scope(scope).bind(dim="head")

    def weights(self, scope: Scope) -> list[Weight]:
        x, q, kv = ("embed",), ("heads", "head"), ("kv_heads", "head")
        projections = {"q": q, "k": kv, "v": kv, "gate": ("heads", "ways")}
        declared = [Weight(name=f"{name}.weight", out=out, inp=x) for name, out in projections.items()]
        declared += [Weight(name="o.weight", out=x, inp=q)]
        for name in ("k", "v"):  # a convolution whose kernel is as wide as its stride: `cost` counts its FLOPs, once per block
            declared += [
                Weight(name=f"{name}_place", out=("block", "head"), role="embed", tp="replicate"),
                Weight(name=f"{name}_in", out=("head",), inp=("block", "head"), role="conv", tp="replicate"),
                Weight(name=f"{name}_out", out=("head",), inp=("head",), role="conv", tp="replicate"),
            ]
        return [*declared, self.head_number()]

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
        # the last token of a block is the first that sees it complete
        whole = size * blocks * (blocks - 1) // 2 + blocks * (left + 1)
        own = blocks * (size * (size + 1) // 2) + left * (left + 1) // 2
        others = sum(size * min(b, self.top + 1) * (size if b < blocks else left) for b in range(blocks + 1))
        return mapped + each * n * (blocks + 2 * n), mapped + each * (whole + own + others + pairs(self.visibility(), n))

    def check(self, scope: Scope) -> list[Problem]:
        patches, local = "blocks are runs of text tokens, not of patches", "use attention with mask: block_local"
        elsewhere = self.position.site == "stream" or self.position.needs()
        what = f"{self.position.kind} does not act on queries and keys themselves"
        wrong = broken(
            (scope.sizes.get("coords", 1) != 1, "", patches, local), (elsewhere, "position", what, "use rope or none")
        )
        return check_heads(self.heads, self.groups(), self.head, scope) or wrong[:1]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        reads = (self.top + ALWAYS) * self.block
        if length is None or length > reads:
            return []
        return [Problem("top", f"all {length} tokens are selected: {reads} are the most", "use attention, or longer sequences")]


class NSAProof(SoftmaxMixerProof, of=NSA):
    """Sampled values, what fields act on and exceptions."""

    acts_on = {"position": ("q", "k", "k_place", "k_in", "k_out")}
    samples = {
        "heads": [6, 4],
        "kv_heads": [2, None, 1],
        "head": [12],
        "block": [4, 3],
        "top": [1, 2],
        "window": [5, 8],
    }

    def excepts(self, part: NSA, scope: Scope) -> dict[str, str]:
        return {**super().excepts(part, scope), "invariant": "φ multiplies the blocks of all rows at once"}


class NSAModule(SoftmaxModule, of=NSA):
    """x (…, n, embed) -> like x."""

    part: NSA
    q: Linear
    k: Linear
    v: Linear
    gate: Linear

    def setup(self) -> None:
        super().setup()
        self.size, self.block = self.scope.size("head"), self.part.block
        self.shared = self.part.heads // self.part.groups()
        self.scale = self.size**-0.5

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        layout = ctx.layout
        q, k, v = (project(x, ctx).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        k, v = ctx.tap(self, "k", self.position.on_write(k, layout)), ctx.tap(self, "v", v)
        (k, v), key_layout = view.append(layout, k, v).entries()
        k, v = ctx.tap(self, "keys", k), ctx.tap(self, "values", v)
        k = self.position.on_read(k, key_layout)
        q = ctx.tap(self, "q", self.position.rotate(q, layout))
        blocks = ended(layout, key_layout, self.block)
        block_k = ctx.tap(self, "block_k", self.mapped("k", k, blocks.tokens))
        block_v = ctx.tap(self, "block_v", self.mapped("v", v, blocks.tokens))
        (block_k, block_v), block_layout = view.append_blocks(blocks.layout, block_k, block_v).entries()
        summary, logs = self.summary(q, block_k, block_v, layout, block_layout)
        picked = ctx.tap(self, "picked", self.pick(self.over_group(logs, ctx), layout, block_layout))
        selected = attend_picked(q, k, v, picked, self.block, self.scale, layout, key_layout)
        near = attend(q, k, v, self.scoring(ctx), layout, key_layout, self.edit(ctx))
        gate = ctx.tap(self, "gate", torch.sigmoid(self.gate(x, ctx)).unflatten(-1, (-1, WAYS)))
        z = torch.stack([ctx.tap(self, "summary", summary), selected, near], -1)
        return self.project_out((z * gate.unsqueeze(-2)).sum(-1), ctx)

    def mapped(self, name: str, x: Tensor, tokens: Tensor) -> Tensor:
        """φ of x (…, m, kv_heads, head) over the tokens (…, blocks, block) of each block: (…, blocks, kv_heads, head)."""
        place, inward, outward = (getattr(self, f"{name}_{which}") for which in ("place", "in", "out"))
        index = tokens.flatten(-2)[..., None, None].expand(*tokens.shape[:-2], -1, *x.shape[-2:])
        pieces = x.gather(-3, index).unflatten(-3, tokens.shape[-2:]).transpose(-3, -2)  # (…, blocks, kv_heads, block, head)
        return F.linear(F.silu(F.linear((pieces + place.view(-1, self.size)).flatten(-2), inward)), outward)

    def summary(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, blocks: TokenLayout) -> tuple[Tensor, Tensor]:
        """z_c (…, n, heads, head), and the log-probs of the complete blocks (…, kv_heads, shared, n, blocks)."""
        whole = same_document(layout, blocks) & (blocks.order[..., None, :] < ((layout.order + 1) // self.block)[..., :, None])
        grouped = q.unflatten(-2, (k.shape[-2], -1)).movedim(-4, -2)  # (…, kv_heads, shared, n, head)
        keys, values = (x.transpose(-3, -2).unsqueeze(-3) for x in (k, v))
        score_dtype = at_least_fp32(q.dtype)
        scores = grouped.to(score_dtype) @ keys.to(score_dtype).transpose(-1, -2) * self.scale
        logs = log_softmax_where(scores, whole[..., None, None, :, :])
        z = (logs.exp().to(v.dtype) @ values).movedim(-2, -4).flatten(-3, -2)
        return z, logs.detach()

    def over_group(self, logs: Tensor, ctx: Ctx) -> Tensor:
        """A block's worth (…, kv_heads, n, blocks): the log of its probability summed over the query heads of a KV head, which
        may be on other ranks. The log, because probabilities far below the largest would all round to 0, and tie."""
        here = logs.shape[-3]
        if here == self.shared:
            return logs.logsumexp(-3)
        everywhere = logs.new_zeros(*logs.shape[:-4], self.part.heads, *logs.shape[-2:])
        logs = ctx.ranks.all_reduce(everywhere.index_add(-3, self.head_number, logs.flatten(-4, -3)), ("heads",))
        return logs.unflatten(-3, (-1, self.shared)).logsumexp(-3).index_select(-3, self.head_number[::here] // self.shared)

    def pick(self, worth: Tensor, layout: TokenLayout, blocks: TokenLayout) -> Tensor:
        """The numbers of the selected blocks (…, kv_heads, n, top + 2), −1 for none: its own, the first, the best others."""
        own, number = layout.order // self.block, blocks.order[..., None, :]
        others = same_document(layout, blocks) & (number > 0) & (number < own[..., None])
        # rounding decides between nearly equal blocks otherwise: within 1 / FINE they tie, and the earlier block is taken
        rank = (worth.clamp_min(-LOWEST) * FINE).round().long() * MOST_BLOCKS - number[..., None, :, :]
        best, column = rank.masked_fill(~others[..., None, :, :], NEVER).topk(min(self.part.top, blocks.n), -1)
        numbers = number.unsqueeze(-3).expand_as(worth).gather(-1, column)
        always = torch.stack([own, torch.where(own > 0, 0, -1)], -1)[..., None, :, :].expand(*worth.shape[:-1], ALWAYS)
        return torch.cat([always, torch.where(best > NEVER, numbers, -1)], -1)
