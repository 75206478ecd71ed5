"""Dense and tiled masks: a query sees the keys that the spec's mask allows, of its own document, and no padding.

    allowed(q, k) = mask(q, k)  ∧  seg_q = seg_k ≥ 0  ∧  row_q = row_k

A kernel takes the dense mask, computed once per step for all layers with an equal mask, or works tile by tile: `plan` finds
out whether each tile of scores is empty, full or partial, from bounds on its tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dovetail.nn.groups import Fill, Mask, Span
from dovetail.nn.layout import TokenLayout

T = TypeVar("T")


def same_document(q: TokenLayout, k: TokenLayout) -> Tensor:
    """(…, n, m) true where both tokens are real, of one document and one row."""
    same = (q.seg[..., :, None] == k.seg[..., None, :]) & (q.seg >= 0)[..., :, None]
    if q.row is not None and k.row is not None:
        same = same & (q.row[..., :, None] == k.row[..., None, :])
    return same


def allowed(mask: Mask, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
    """(…, 1 or heads, n, m) true where query n may see key m."""
    return mask.visible(q, k, heads) & same_document(q, k)[..., None, :, :]


def dense(mask: Mask, q: TokenLayout, k: TokenLayout, heads: Tensor) -> tuple[Tensor, Tensor]:
    """(allowed, queries that see no key), computed once per step for all layers with an equal mask."""
    return _shared("allowed", mask, q, k, heads.shape[0], lambda: _dense(mask, q, k, heads))


def _dense(mask: Mask, q: TokenLayout, k: TokenLayout, heads: Tensor) -> tuple[Tensor, Tensor]:
    visible = allowed(mask, q, k, heads)
    return visible, ~visible.any(-1, keepdim=True)


def _shared(what: str, mask: Mask, q: TokenLayout, k: TokenLayout, heads: int, make: Callable[[], T]) -> T:
    return k.once_for(q, (what, mask.key, heads if mask.by_head() else 0), make)


def span_document(q: Span, k: Span) -> Fill:
    """How much of a tile lies within one document and row."""
    if max(q.seg_low, k.seg_low, 0) > min(q.seg_high, k.seg_high) or q.row_low > k.row_high or k.row_low > q.row_high:
        return Fill.EMPTY
    alone = q.seg_low == q.seg_high == k.seg_low == k.seg_high and q.row_low == q.row_high == k.row_low == k.row_high
    return Fill.FULL if alone else Fill.PART


def spans(layout: TokenLayout, size: int, step: int = 1, known: Sequence[int] = ()) -> list[Span]:
    """The bounds of each run of `size` tokens, over all rows of the batch; `known` are the positions of whole sequences."""

    def compute() -> list[Span]:
        starts = np.arange(0, layout.n, size)
        if layout.start is None and not known:
            order, seg = (x.numpy(force=True).reshape(-1, layout.n) for x in (layout.order, layout.seg))
        else:  # read from no tensor: `plan` traces fake ones, which have no values
            order = np.asarray(known or range(layout.start or 0, (layout.start or 0) + layout.n))[None]
            seg = np.zeros_like(order)
        row = np.zeros((1, layout.n), np.int64) if layout.row is None else layout.row.numpy(force=True)[None]
        residue = order % step
        edges = [f.reduceat(f.reduce(a, axis=0), starts) for a in (order, seg, row, residue) for f in (np.minimum, np.maximum)]
        steps = np.full(len(starts), step)
        return [Span(*edge) for edge in zip(*(e.tolist() for e in (*edges[:6], steps, *edges[6:])), strict=True)]

    return layout.once(("spans", size, step), compute)


class TileRun(NamedTuple):
    """Neighboring key tiles that one query tile touches, [begin, end) in tokens. `full`: every head sees all of it. `alone`:
    queries and keys are of one document, so that the mask alone decides."""

    begin: int
    end: int
    full: bool
    alone: bool = False


def plan(mask: Mask, q: TokenLayout, k: TokenLayout, heads: int, tile_q: int, tile_k: int) -> list[list[TileRun]]:
    """The runs of keys that each query tile touches."""

    def compute() -> list[list[TileRun]]:
        step = mask.regroup()
        # where the mask differs by head, a tile is skipped only if every head skips it
        tested_heads = range(heads) if mask.by_head() else range(1)
        fills = _fills(mask, _levels(spans(q, tile_q, step)), _levels(spans(k, tile_k, step)), tested_heads)
        return [_runs(row, tile_k, k.n) for row in fills]

    return _shared(f"plan {tile_q} {tile_k}", mask, q, k, heads, compute)


def _levels(tiles: list[Span]) -> list[list[Span]]:
    """The bounds of single tiles, then of pairs of tiles, then of fours …, up to all tiles together."""
    levels = [tiles]
    while len(levels[-1]) > 1:
        levels.append([_around(levels[-1][i : i + 2]) for i in range(0, len(levels[-1]), 2)])
    return levels


def _around(pair: list[Span]) -> Span:
    """The bounds of one or two neighboring runs of tokens together."""
    low, high, seg_low, seg_high, row_low, row_high, step, residue_low, residue_high = zip(*pair, strict=True)
    edges = (min(low), max(high), min(seg_low), max(seg_high), min(row_low), max(row_high))
    return Span(*edges, step[0], min(residue_low), max(residue_high))


def _fills(mask: Mask, q: list[list[Span]], k: list[list[Span]], heads: range) -> np.ndarray:
    """(query tiles, key tiles) the fill of each, plus 3 where it lies in one document. A quadtree: the whole is tested first,
    and only partial rectangles are split into four, so that a window costs as many tests as it touches tiles."""
    fills = np.zeros((len(q[0]), len(k[0])), np.int8)

    def below(levels: list[list[Span]], level: int, i: int) -> range:
        return range(1) if level >= len(levels) else range(2 * i, min(2 * i + 2, len(levels[level - 1])))

    def visit(level: int, i: int, j: int) -> None:
        fill, alone = _fill(mask, q[min(level, len(q) - 1)][i], k[min(level, len(k) - 1)][j], heads)
        if fill is Fill.PART and level > 0:
            for a in below(q, level, i):
                for b in below(k, level, j):
                    visit(level - 1, a, b)
        else:  # empty or full for every tile inside
            fills[i << level : (i + 1) << level, j << level : (j + 1) << level] = fill.value + 3 * alone

    if fills.size:
        visit(max(len(q), len(k)) - 1, 0, 0)
    return fills


def _runs(fills: np.ndarray, size: int, n: int) -> list[TileRun]:
    """Join neighboring tiles of equal fill to runs, and leave out empty ones."""
    edges = [0, *(np.flatnonzero(np.diff(fills)) + 1).tolist(), len(fills)]
    values = ((begin, end, int(fills[begin])) for begin, end in pairwise(edges))
    runs = ((begin, end, Fill(value % 3), value >= 3) for begin, end, value in values)
    return [
        TileRun(begin * size, min(end * size, n), fill is Fill.FULL, alone)
        for begin, end, fill, alone in runs
        if fill is not Fill.EMPTY
    ]


def _fill(mask: Mask, q: Span, k: Span, heads: range) -> tuple[Fill, bool]:
    document = span_document(q, k)
    if document is Fill.EMPTY:
        return Fill.EMPTY, False
    alone = document is Fill.FULL
    fill = mask.tile(q, k, 0)
    if any(mask.tile(q, k, head) is not fill for head in heads[1:]):
        return Fill.PART, alone
    return Fill.PART if fill is Fill.FULL and not alone else fill, alone


MAX_COUNTED = 2**22  # most scores that `pairs` counts one by one; beyond, it samples queries
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly and share no period with any mask


@lru_cache(maxsize=4096)
def pairs(mask: Mask, n: int) -> int:
    """The number of (query, key) pairs that the mask allows in one document of n tokens, averaged over heads.

    Full tiles count by their area. Partial tiles are counted score by score, or, where there are too many, at a few queries
    each. These are taken in pairs mirrored about the middle of the tile, so that counts that grow linearly from row to row
    (causal, blocks) stay exact.
    """
    layout = TokenLayout.whole(1, n)
    heads = torch.arange(8 if mask.by_head() else 1)
    size = max(64, n // min(64, max(8, 2 * MAX_COUNTED // (n * len(heads)))))
    tiles = plan(mask, layout, layout, len(heads), size, size)
    partial = sum(run.end - run.begin for runs in tiles for run in runs if not run.full) * size * len(heads)
    rows = size if partial <= MAX_COUNTED else max(2, MAX_COUNTED // (len(tiles) * n * len(heads)) // 2 * 2)
    total = 0.0
    for i, runs in enumerate(tiles):
        query = torch.arange(i * size, min((i + 1) * size, n))
        sample = query if rows >= len(query) else _mirrored(query, rows // 2, i)
        for run in runs:
            width = run.end - run.begin
            if not run.full:
                visible = mask.visible(layout.pick(sample), layout.pick(slice(run.begin, run.end)), heads)
                width = int(visible.expand(1, len(heads), -1, -1).sum()) / (len(sample) * len(heads))
            total += len(query) * width
    return round(total)


def _mirrored(query: Tensor, count: int, tile: int) -> Tensor:
    """2·count of the queries: `count` spread over the tile, different ones in each tile, and their mirror images."""
    near = ((torch.arange(1, count + 1) + tile * count) * GOLDEN % 1 * len(query)).long()
    return query[torch.cat([near, len(query) - 1 - near])]
