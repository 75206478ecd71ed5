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
from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dovetail.core.layout import TokenLayout
from dovetail.core.module import at_least_fp32
from dovetail.core.view import Scoring
from dovetail.ops.backend import Shape
from dovetail.ops.mask import Run, allowed
from dovetail.ops.tiles import Piece, Tile, Tiling, add, put, take

OFFERS = frozenset({"bias", "bias_grad", "softcap", "sink"})
TILE = 64  # tokens per tile, of queries and of keys
PIECE = 1024  # most keys per piece: bounds the workspace
CACHED_MASKS = 4  # tile masks cached per tile of queries and step


def cost(shape: Shape, needs: frozenset[str]) -> float:
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
    edit: None = None,
) -> Tensor:
    """(…, heads, n, head), computed over the tiles that the mask touches. `visible` is not used: no dense mask is computed."""
    if q.dim() == 3:
        return run(q[None], k[None], v[None], scoring, q_layout, k_layout)[0]
    if scoring.mask.regroup() > 1 and q_layout.start is None and q.shape[0] > 1:  # each row has its own order of residues
        rows = [
            run(q[i : i + 1], k[i : i + 1], v[i : i + 1], scoring, _row(q_layout, i), _row(k_layout, i))
            for i in range(q.shape[0])
        ]
        return torch.cat(rows)
    if scoring.mask.by_head():
        return _by_head(q, k, v, scoring, q_layout, k_layout)
    out, lse = _Tiled.apply(q.unflatten(1, (k.shape[1], -1)), k, v, Work.of(scoring, q_layout, k_layout), *scoring.tables)  # type: ignore[misc]
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if scoring.sink is not None:
        out = out * torch.sigmoid(lse - scoring.sink[:, None].to(lse.dtype))[..., None].to(out.dtype)
    return out


def touched(scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout) -> int:
    """The number of scores per row in the tiles that are computed, averaged over heads."""
    masks = [scoring.mask.for_head(head) for head in scoring.heads.tolist()] if scoring.mask.by_head() else [scoring.mask]
    return sum(Work.of(dc.replace(scoring, mask=mask), q_layout, k_layout).tiling.touched() for mask in masks) // len(masks)


def _row(layout: TokenLayout, i: int) -> TokenLayout:
    return TokenLayout(layout.coords[i : i + 1], layout.order[i : i + 1], layout.seg[i : i + 1])


def _by_head(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout) -> Tensor:
    """Run heads with equal masks together, so that each set computes only its own tiles."""
    shared, sets = q.shape[1] // k.shape[1], {}
    for i, head in enumerate(scoring.heads.tolist()):
        sets.setdefault(scoring.mask.for_head(head), []).append(i)
    outputs: list[Tensor] = []
    for mask, own in sets.items():
        groups = [i // shared for i in own]
        even = len({groups.count(group) for group in groups}) == 1  # only then can the heads of a set share KV heads
        heads, keys = (torch.tensor(x, device=q.device) for x in (own, sorted(set(groups)) if even else groups))
        own_scoring = dc.replace(
            scoring,
            mask=mask,
            heads=scoring.heads[heads],
            bias=None if scoring.bias is None else partial(_of_heads, scoring.bias, heads),
            sink=None if scoring.sink is None else scoring.sink[heads],
        )
        k_own, v_own = k.index_select(1, keys), v.index_select(1, keys)
        outputs.append(run(q.index_select(1, heads), k_own, v_own, own_scoring, q_layout, k_layout))
    original_order = torch.tensor([i for own in sets.values() for i in own], device=q.device).argsort()
    return torch.cat(outputs, 1).index_select(1, original_order)


def _of_heads(
    bias: Callable[..., Tensor], heads: Tensor, q_layout: TokenLayout, k_layout: TokenLayout, *tables: Tensor
) -> Tensor:
    return bias(q_layout, k_layout, *tables).index_select(-3, heads)


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

    @staticmethod
    def of(scoring: Scoring, q_layout: TokenLayout, k_layout: TokenLayout) -> Work:
        """The work for these tokens; tiles are planned once per step for all layers with an equal mask."""
        key, given = (scoring.mask.key, TILE, PIECE), (scoring.mask, q_layout, k_layout, len(scoring.heads), TILE, PIECE)
        tiling = k_layout.once_for(q_layout, ("tiling", *key), Tiling, *given)
        masks = k_layout.once_for(q_layout, ("tile masks", *key), MaskCache, CACHED_MASKS * TILE * q_layout.n)
        relative = scoring.mask.relative() and q_layout.start is not None and k_layout.start is not None
        return Work(scoring, _one_row(q_layout), _one_row(k_layout), tiling, relative, masks)

    def bias(self, tile: Tile, piece: Piece, tables: tuple[Tensor, ...]) -> Tensor | None:
        """(…, heads, n, m) added to the scores of one piece."""
        if self.scoring.bias is None:
            return None
        return self.scoring.bias(self.q_layout.pick(tile.queries), self.k_layout.pick(piece.keys), *tables)

    def additive_mask(self, tile: Tile, runs: list[Run]) -> Tensor:
        """(…, 1, n, m) 0 where a query may see a key of the runs, −∞ elsewhere."""
        # runs inside one document need no document mask
        visible = self.scoring.mask.visible if all(run.alone for run in runs) else partial(allowed, self.scoring.mask)
        keys = self.k_layout.pick(self.tiling.k.where(runs))
        return torch.where(visible(self.q_layout.pick(tile.queries), keys, self.scoring.heads), 0.0, -torch.inf)

    def kind(self, tile: Tile, runs: list[Run]) -> tuple[Any, ...]:
        """The cache key of a tile's mask: equal for tiles at equal distances where the mask is relative."""
        each = [keys for run in runs if isinstance(keys := self.tiling.k.where([run]), slice)]
        if not self.relative or not isinstance(tile.queries, slice) or len(each) < len(runs):
            return tile.number, *runs
        first, end, step = tile.queries.start, tile.queries.stop, tile.queries.step
        return end - first, step, *((first - keys.start, keys.stop - keys.start, keys.step) for keys in each)

    def scores(self, query: Tensor, key: Tensor, tile: Tile, piece: Piece, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
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
            make = partial(self.additive_mask, tile, piece.masked)
            mask = self.masks.once(self.kind(tile, piece.masked), make).unsqueeze(-3)
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


class _Tiled(torch.autograd.Function):
    """q (rows, kv_heads, shared, n, head), k, v (rows, kv_heads, m, head) -> z like q, lse (rows, kv_heads, shared, n)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work, *tables: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, groups, shared, n, _ = q.shape
        out = q.new_zeros(rows, n, groups, shared, v.shape[-1]).permute(
            0, 2, 3, 1, 4
        )  # strided by token, like the residual stream
        dtype = at_least_fp32(q.dtype)
        # for a query that sees no key: very low but finite, so that σ(lse − sink) is 0 with gradient 0, not NaN
        lse = q.new_full(q.shape[:-1], torch.finfo(dtype).min / 4, dtype=dtype)
        for tile in work.tiling.tiles:
            query = take(q, tile.queries).flatten(2, 3).to(dtype)
            top = take(lse[..., None], tile.queries)
            total, acc = torch.zeros_like(top), lse.new_zeros(*query.shape[:-1], v.shape[-1])
            for piece in tile.pieces:
                key, value = take(k, piece.keys).to(dtype), take(v, piece.keys).to(dtype)
                scores, _ = work.scores(query, key, tile, piece, work.bias(tile, piece, tables))
                peak = torch.maximum(top, scores.amax(-1, keepdim=True))
                shrink, top = torch.exp(top - peak), peak
                p = _exp(scores.sub_(peak))
                total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                acc = acc.mul_(shrink.flatten(2, 3)).add_(p.flatten(2, 3) @ value)
            total = total.clamp_min_(1.0)  # the greatest score adds 1, so only a query that sees no key has less
            put(out, tile.queries, acc.div_(total.flatten(2, 3)).unflatten(2, (shared, -1)).to(out.dtype))
            put(lse[..., None], tile.queries, top + total.log())
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *tables = ctx.saved_tensors
        work: Work = ctx.work
        dtype = lse.dtype  # of every sum; gradients are rounded to the dtype of q, k and v at the end
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        learned = [i for i in range(len(tables)) if ctx.needs_input_grad[4 + i]]
        dtables = [torch.zeros_like(t) if i in learned else None for i, t in enumerate(tables)]
        g = torch.zeros_like(out) if g is None else g
        for tile in work.tiling.tiles:
            query, grad = take(q, tile.queries).flatten(2, 3).to(dtype), take(g, tile.queries).to(dtype)
            level = take(lse[..., None], tile.queries)
            delta = (grad * take(out, tile.queries)).sum(-1, keepdim=True)
            if g_lse is not None:
                delta -= take(g_lse[..., None], tile.queries)
            grad, dquery = grad.flatten(2, 3), torch.zeros_like(query)
            for piece in tile.pieces:
                key, value = take(k, piece.keys).to(dtype), take(v, piece.keys).to(dtype)
                with torch.enable_grad():
                    free = tuple(t.detach().requires_grad_(i in learned) for i, t in enumerate(tables))
                    bias = work.bias(tile, piece, free)
                scores, capped = work.scores(query, key, tile, piece, None if bias is None else bias.detach())
                p = _exp(scores.sub_(level))
                add(dv, piece.keys, p.flatten(2, 3).transpose(-1, -2) @ grad)
                ds = (grad @ value.transpose(-1, -2)).view_as(p).sub(delta).mul_(p)
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
        dq, dk = dq.mul_(work.scoring.scale), dk.mul_(work.scoring.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, *dtables
