"""Tiled attention: online softmax over the tiles that a mask touches, forward and backward, in memory linear in n.

For each tile of queries, the keys that it touches are processed in pieces, with a running maximum m and a running sum l:

    s = cap(q kᵀ · scale) + bias      m' = max(m, max s)      o ← o·e^(m−m') + e^(s−m') v      l ← l·e^(m−m') + Σ e^(s−m')

then z = o / l and lse = m + log l. Backward recomputes s piece by piece: p = e^(s − lse), dv = pᵀg, ds = p ∘ (g vᵀ − Δ) with
Δ = Σ g∘z − g_lse. A learned sink s₀ only rescales: z · σ(lse − s₀). Biases are computed piece by piece, and their tables get
gradients. Besides the outputs, memory holds the scores of one piece, and masks of partial tiles, which all layers of a step
share: a few tiles where the mask depends on the distance alone, otherwise at most CACHED_MASKS · TILE values per token.

Shapes: q (…, heads, n, head), k, v (…, kv_heads, m, head). The query heads of one KV head share a matmul:
q (rows, kv_heads, shared, n, head), in a tile (rows, kv_heads, shared·n, head).
Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao 2023.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.nn.view import Edit, Scoring
from dovetail.ops.attend_sets import attend_sets
from dovetail.ops.implementation import ProblemSize
from dovetail.ops.mask import allowed
from dovetail.ops.tiles import LOOPS, KeyPiece, Tile, Tiling, add, extent, put, take

OFFERS = frozenset({"bias", "bias_grad", "softcap", "sink", "prefix", "dropout"})
TILE = 64  # tokens per tile, of queries and of keys
PIECE = 1024  # most keys per piece: bounds the workspace
CACHED_MASKS = 4  # tile masks cached per tile of queries and step


def cost(shape: ProblemSize, needs: frozenset[str]) -> float:
    """Nanoseconds, roughly: more per score than the fused kernel, but only for the scores that the mask touches; plus a fixed
    cost per tile of queries."""
    each = 13.0 + 5.0 * ("bias" in needs) + 5.0 * ("bias_grad" in needs)
    tiles, heads = -(-shape.queries // TILE), shape.rows * shape.heads
    return tiles * (200_000.0 + 36_000.0 * heads) + each * heads * shape.touched


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    visible: object = None,
    edit: Edit | None = None,
) -> Tensor:
    """(…, heads, n, head), computed over the tiles that the mask touches. `visible` is not used: no dense mask is computed."""
    return attend_sets(_tiled, q, k, v, scoring, edit, q_layout, k_layout)


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, edit: Edit | None, q_layout: TokenLayout, k_layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    return _Tiled.apply(q, k, v, Work.of(scoring, q_layout, k_layout, edit), *scoring.tables)  # type: ignore[return-value]


def touched(scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout) -> int:
    """The number of scores per row in the tiles that are computed, averaged over heads."""
    masks = [scoring.mask.for_head(head) for head in scoring.heads.tolist()] if scoring.mask.by_head() else [scoring.mask]
    return sum(Work.of(dc.replace(scoring, mask=mask), q_layout, k_layout).tiling.touched() for mask in masks) // len(masks)


class MaskCache:
    """Masks of tiles, shared by the layers of a step and by backward; at most `room` values in total."""

    def __init__(self, room: int) -> None:
        self.room, self.masks = room, {}

    def once(self, kind: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the mask of this kind: a cached one, or make(), which is cached while there is room."""
        if kind in self.masks:
            return self.masks[kind]
        mask = make()
        if mask.numel() <= self.room:
            self.room -= mask.numel()
            self.masks[kind] = mask
        return mask


@dc.dataclass
class Work:
    """The inputs of the kernel besides q, k and v."""

    scoring: Scoring
    q_layout: TokenLayout
    k_layout: TokenLayout
    tiling: Tiling
    relative: bool  # the mask depends on the distance alone, so that tiles at equal distances have equal masks
    masks: MaskCache
    edit: Edit | None = None  # one that scales
    edit_layouts: tuple[TokenLayout, ...] = ()  # of all rows, which draw different numbers where their positions are equal

    @staticmethod
    def of(scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout, edit: Edit | None = None) -> Work:
        """The work for these tokens; tiles are planned once per step for all layers with an equal mask."""
        key, given = (scoring.mask.key, TILE, PIECE), (scoring.mask, q_layout, k_layout, len(scoring.heads), TILE, PIECE)
        tiling = k_layout.once_for(q_layout, ("tiling", *key), Tiling, *given)
        masks = k_layout.once_for(q_layout, ("tile masks", *key), MaskCache, CACHED_MASKS * TILE * q_layout.n)
        relative = scoring.mask.relative() and q_layout.start is not None and k_layout.start is not None
        layouts = () if edit is None else (q_layout, k_layout)
        return Work(scoring, _one_row(q_layout), _one_row(k_layout), tiling, relative, masks, edit, layouts)

    @property
    def empty(self) -> bool:
        """Whether no query sees any key."""
        return not any(tile.pieces for tile in self.tiling.tiles)

    def loop(self) -> Iterator[tuple[Tile, Iterable[KeyPiece]]]:
        """The tiles of queries, and the pieces of keys of each."""
        return LOOPS[-1](self.tiling.tiles, self.alike) if LOOPS else ((tile, tile.pieces) for tile in self.tiling.tiles)

    def alike(self, piece: KeyPiece) -> Hashable:
        """Equal for pieces that need the same operations on tensors of the same shapes, and the same mask."""
        return extent(piece.queries), extent(piece.keys), self.kind(piece) if piece.masked else None

    def factor(self, p: Tensor, piece: KeyPiece) -> Tensor:
        """What the probs p (rows, kv_heads, shared, n, m) of one piece are multiplied by."""
        assert self.edit is not None
        q_layout, k_layout = self.edit_layouts
        ones = torch.ones_like(p).flatten(1, 2)
        return self.edit(ones, q_layout.pick(piece.queries), k_layout.pick(piece.keys)).unflatten(1, p.shape[1:3])

    def bias(self, piece: KeyPiece, tables: Sequence[Tensor]) -> Tensor | None:
        """(…, heads, n, m) added to the scores of one piece."""
        if self.scoring.bias is None:
            return None
        return self.scoring.bias(self.q_layout.pick(piece.queries), self.k_layout.pick(piece.keys), *tables)

    def additive_mask(self, piece: KeyPiece) -> Tensor:
        """(…, 1, n, m) 0 where a query may see a key of the masked runs, −∞ elsewhere."""
        runs = piece.masked
        # runs inside one document need no document mask
        visible = self.scoring.mask.visible if all(run.alone for run in runs) else partial(allowed, self.scoring.mask)
        keys = self.k_layout.pick(self.tiling.k.where(runs))
        return torch.where(visible(self.q_layout.pick(piece.queries), keys, self.scoring.heads), 0.0, -torch.inf)

    def kind(self, piece: KeyPiece) -> tuple[Any, ...]:
        """The cache key of a piece's mask: equal for pieces at equal distances where the mask is relative."""
        queries, runs = piece.queries, piece.masked
        each = [keys for run in runs if isinstance(keys := self.tiling.k.where([run]), slice)]
        if not self.relative or not isinstance(queries, slice) or len(each) < len(runs):
            return piece.tile, *runs
        first, end, step = queries.start, queries.stop, queries.step
        return end - first, step, *((first - keys.start, keys.stop - keys.start, keys.step) for keys in each)

    def scores(self, query: Tensor, key: Tensor, piece: KeyPiece, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(rows, kv_heads, shared, n, m) scores of one piece with −∞ where not allowed; tanh of the capped scores.
        Query and key have the dtype of the scores: a product rounded to bfloat16 moves a score of 30 by up to 1/16."""
        groups, shared = query.shape[1], len(self.scoring.heads) // query.shape[1]
        scores = (query @ key.transpose(-1, -2)).mul_(self.scoring.scale).unflatten(2, (shared, -1))
        capped = None
        if self.scoring.softcap is not None:
            capped = torch.tanh(scores / self.scoring.softcap)
            scores = self.scoring.softcap * capped
        if bias is not None:
            scores += _by_group(bias, groups)
        if piece.masked:  # adding −∞ is far cheaper than masked_fill_
            mask = self.masks.once(self.kind(piece), partial(self.additive_mask, piece)).unsqueeze(-3)
            parts = mask.split([run.end - run.begin for run in piece.masked], -1)
            for columns, part in zip(piece.columns, parts, strict=True):
                scores[..., columns].add_(part)
        return scores, capped


def _one_row(layout: TokenLayout) -> TokenLayout:
    """The layout of one row, where all rows have equal positions: masks are then computed for one row only."""
    if not layout.alike:
        return layout
    return TokenLayout(layout.coords[:1], layout.order[:1], None, start=layout.start)


def _exp(x: Tensor) -> Tensor:
    """e^x in place, and exactly 0 where it is tiny: −∞ and subnormal numbers make exp and matmul many times slower."""
    least = torch.finfo(x.dtype).tiny * 2**24
    return F.threshold(x.clamp_min_(log(least)).exp_(), least * (1 + 2**-10), 0.0, inplace=True)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(…, 1 or heads, n, m) -> (…, 1 or kv_heads, 1 or shared, n, m)."""
    return x.unsqueeze(-3) if x.shape[-3] == 1 else x.unflatten(-3, (groups, -1))


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, work: Work, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """q (rows, kv_heads, shared, n, head), k, v (rows, kv_heads, m, head) -> z like q, lse (rows, kv_heads, shared, n)."""
    rows, groups, shared, n, _ = q.shape
    # strided by token, like the residual stream
    out = q.new_zeros(rows, n, groups, shared, v.shape[-1]).permute(0, 2, 3, 1, 4)
    dtype = at_least_fp32(q.dtype)
    # for a query that sees no key: very low but finite, so that σ(lse − sink) is 0 with gradient 0, not NaN
    lse = q.new_full(q.shape[:-1], torch.finfo(dtype).min / 4, dtype=dtype)
    for tile, pieces in work.loop():
        query = take(q, tile.queries).flatten(2, 3).to(dtype)
        top = take(lse[..., None], tile.queries)
        total, acc = torch.zeros_like(top), lse.new_zeros(*query.shape[:-1], v.shape[-1])
        for piece in pieces:
            key, value = take(k, piece.keys).to(dtype), take(v, piece.keys).to(dtype)
            scores, _ = work.scores(query, key, piece, work.bias(piece, tables))
            peak = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink, top = torch.exp(top - peak), peak
            p = _exp(scores.sub_(peak))
            total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            p = p if work.edit is None else p * work.factor(p, piece)
            acc = acc.mul_(shrink.flatten(2, 3)).add_(p.flatten(2, 3) @ value)
        total = total.clamp_min_(1.0)  # the greatest score adds 1, so only a query that sees no key has less
        put(out, tile.queries, acc.div_(total.flatten(2, 3)).unflatten(2, (shared, -1)).to(out.dtype))
        put(lse[..., None], tile.queries, top + total.log())
    return out, lse


class Grads(NamedTuple):
    """Gradients in the dtype of the scores; of a table that needs none, None."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor | None]


def tiles_backward(
    saved: Sequence[Tensor],  # q, k, v, out, lse and the tables
    g: Tensor | None,
    g_lse: Tensor | None,
    work: Work,
    learned: Sequence[int],
) -> Grads:
    """The gradients from those of out and lse; `learned` are the numbers of the tables that need one. Where k, v are some of
    the keys, and out and lse those over all keys, q and the tables get what these keys contribute."""
    q, k, v, out, lse, *tables = saved
    dtype = lse.dtype  # of every sum
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    dtables = [torch.zeros_like(t) if i in learned else None for i, t in enumerate(tables)]
    g = torch.zeros_like(out) if g is None else g
    for tile, pieces in work.loop():
        query, grad = take(q, tile.queries).flatten(2, 3).to(dtype), take(g, tile.queries).to(dtype)
        level = take(lse[..., None], tile.queries)
        delta = (grad * take(out, tile.queries)).sum(-1, keepdim=True)
        if g_lse is not None:
            delta -= take(g_lse[..., None], tile.queries)
        grad, dquery = grad.flatten(2, 3), torch.zeros_like(query)
        for piece in pieces:
            key, value = take(k, piece.keys).to(dtype), take(v, piece.keys).to(dtype)
            with torch.enable_grad():
                free = tuple(t.detach().requires_grad_(i in learned) for i, t in enumerate(tables))
                bias = work.bias(piece, free)
            scores, capped = work.scores(query, key, piece, None if bias is None else bias.detach())
            p = _exp(scores.sub_(level))
            dp = (grad @ value.transpose(-1, -2)).view_as(p)
            kept = p
            if work.edit is not None:
                factor = work.factor(p, piece)
                kept, dp = p * factor, dp.mul_(factor)
            add(dv, piece.keys, kept.flatten(2, 3).transpose(-1, -2) @ grad)
            ds = dp.sub_(delta).mul_(p)
            if bias is not None and learned:
                each = torch.autograd.grad(bias, [free[i] for i in learned], ds.flatten(1, 2).sum_to_size(bias.shape))
                for i, d in zip(learned, each, strict=True):
                    dtables[i] += d  # type: ignore[operator]
            if capped is not None:
                ds = ds * (1 - capped * capped)
            ds = ds.flatten(2, 3)
            dquery += ds @ key
            add(dk, piece.keys, ds.transpose(-1, -2) @ query)
        put(dq, tile.queries, dquery.unflatten(2, (q.shape[2], -1)))
    return Grads(dq.mul_(work.scoring.scale), dk.mul_(work.scoring.scale), dv, dtables)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work, *tables: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, lse = attend_tiles(q, k, v, work, tables)
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, *_ = saved = ctx.saved_tensors
        learned = [i for i in range(len(saved) - 5) if ctx.needs_input_grad[4 + i]]
        grads = tiles_backward(saved, g, g_lse, ctx.work, learned)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), None, *grads.tables
