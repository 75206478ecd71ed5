"""Oracles of tilings: spans, plans of tiles, pieces, and counts of pairs.

Plans are written as strings: `0–4# 4–6+` is a tile of queries that sees all of the keys 0 … 3 and some of 4, 5; with `?` the
documents have to be compared too. Tokens `1:6:2` are a slice (1, 3, 5), `6,1` an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.ops import mask as counted
from dovetail.ops.mask import TileRun, dense, pairs, plan, same_document, spans
from dovetail.ops.tiles import TileOrder, Tiling, Where, add, put, take
from dovetail.proof.laws.oracle import Comparison, oracle, part, row


def _plan(mask: Any, q: TokenLayout, k: TokenLayout | None = None, heads: int = 1, size: int = 2) -> list[str]:
    """One string per tile of queries."""
    tiles = plan(mask, q, q if k is None else k, heads, size, size)
    return [" ".join(f"{r.begin}–{r.end}{'#' if r.full else '+'}{'' if r.alone else '?'}" for r in runs) for runs in tiles]


@oracle("causal")
def documents() -> Iterator[Comparison]:
    """Tokens see tokens of their own document and row, and no padding; queries that see no key are marked as empty."""
    q, k = TokenLayout.flat([2, 1]), TokenLayout.flat([1, 2])
    yield Comparison("rows 0, 0, 1 and 0, 1, 1", same_document(q, k).int(), [[1, 0, 0], [1, 0, 0], [0, 1, 1]], near=0)
    single = TokenLayout.of(torch.arange(2), torch.zeros(2, dtype=torch.long))
    yield Comparison(
        "keys without a row are visible to all rows", same_document(q, single).int(), [[1, 1], [1, 1], [1, 1]], near=0
    )
    yield Comparison("queries without a row see all rows", same_document(single, k).int(), [[1, 1, 1], [1, 1, 1]], near=0)
    layout = TokenLayout.packed([[1, 2]], 4)
    rows = [[[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]]
    yield Comparison("two documents, and padding that does not see itself", same_document(layout, layout).int(), rows, near=0)
    _, empty = dense(part("causal"), layout, layout, torch.arange(3))
    yield Comparison("queries that see no key", empty.int(), [[[[0], [0], [0], [1]]]], near=0)
    ahead = row(2, start=3)
    _, empty = dense(part("causal"), row(4), ahead, torch.arange(1))
    yield Comparison("queries before all keys", empty.int(), [[[[1], [1], [1], [0]]]], near=0)


@oracle("causal")
def extremes() -> Iterator[Comparison]:
    """Spans: the least and greatest order, document and row; the step, and the least and greatest order modulo it."""
    whole = [[0, 1, 0, 0, 0, 0, 1, 0, 0], [2, 3, 0, 0, 0, 0, 1, 0, 0], [4, 4, 0, 0, 0, 0, 1, 0, 0]]
    yield Comparison("five in a row", [list(span) for span in spans(row(5), 2)], whole, near=0)
    flat = [[0, 1, 0, 0, 0, 0, 3, 0, 1], [5, 5, 0, 0, 1, 1, 3, 2, 2]]
    yield Comparison("two rows, flat", [list(span) for span in spans(TokenLayout.flat([2, 1], [0, 5]), 2, 3)], flat, near=0)
    # orders 0 1 2 0 1 and 0 0 1 2 0, documents 0 0 0 1 1 and 0 1 1 1 −1
    layout = TokenLayout.packed([[3, 2], [1, 3]], 5)
    both = [[0, 2, 0, 1, 0, 0, 2, 0, 1], [0, 2, -1, 1, 0, 0, 2, 0, 1]]
    yield Comparison("over two packed rows", [list(span) for span in spans(layout, 3, 2)], both, near=0)


@oracle("causal")
def plans() -> Iterator[Comparison]:
    """Tiles of two over seven tokens."""
    causal = part("causal")
    yield Comparison("causal", _plan(causal, row(7)), ["0–2+", "0–2# 2–4+", "0–4# 4–6+", "0–7#"])
    yield Comparison("two at the end", _plan(causal, row(2, start=5), row(7)), ["0–6# 6–7+"])
    yield Comparison("one key", _plan(causal, row(5), row(1, start=3)), ["", "0–1+", "0–1#"])
    yield Comparison("few keys", _plan(part("full"), row(3), row(2)), ["0–2#", "0–2#"])
    # documents of 3 and 4 tokens: the second tile has the end of one and the beginning of the other
    packed = ["0–2+ 2–4+?", "0–6+?", "2–4+? 4–6+", "2–4+? 4–7#"]
    yield Comparison("two documents", _plan(causal, TokenLayout.packed([[3, 4]], 7)), packed)
    yield Comparison("flat", _plan(causal, TokenLayout.flat([2, 3], [0, 4])), ["0–2+", "2–4+", "2–5#"])
    yield Comparison("flat, across rows", _plan(causal, TokenLayout.flat([1, 2], [3, 3])), ["0–2+?", "0–2+? 2–3#"])
    # where the mask differs by head, a tile is full or empty only if it is so for every head
    heads = part("by_head", masks=(part("full"), causal))
    yield Comparison("by head", _plan(heads, row(5), heads=2), ["0–5+", "0–2# 2–5+", "0–5#"])
    yield Comparison("by head, one head", _plan(heads, row(5), heads=1), ["0–5#"] * 3)


class _Watched:
    """A mask that counts the tiles and scores it computes, and records the queries of each call."""

    def __init__(self, mask: Any) -> None:
        self.mask, self.tiles, self.scores, self.queries = mask, 0, 0, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mask, name)

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        """The mask's own `visible`."""
        self.scores += q.n * k.n * len(heads)
        self.queries.append(q.order[0].tolist())
        return self.mask.visible(q, k, heads)

    def tile(self, *spans: Any) -> Any:
        """The mask's own `tile`."""
        self.tiles += 1
        return self.mask.tile(*spans)


@oracle("causal")
def planning_steps() -> Iterator[Comparison]:
    """The number of calls of `tile`: all tiles are tested as one, and a partial rectangle is split into four."""

    def calls(mask: Any, q: TokenLayout, k: TokenLayout | None = None) -> int:
        watched: Any = _Watched(mask)
        plan(watched, q, q if k is None else k, 1, 2, 2)
        return watched.tiles

    yield Comparison("full, four tiles", calls(part("full"), row(8)), 1, near=0)
    yield Comparison("causal, four: 1 + 4 + 2·4", calls(part("causal"), row(8)), 13, near=0)
    # three tiles are two and one: 1 + 4, of which the first is partial and split into 4, the last is one tile
    yield Comparison("causal, three: 1 + 4 + 4 + 1", calls(part("causal"), row(6)), 10, near=0)
    # 1 + 4; 3 of these are partial, each split into 4: about as many calls as the mask touches tiles
    near = part("causal") & part("window", size=1)
    yield Comparison("a window, eight: 1 + 4 + 2·4 + 4·4", calls(near, row(16)), 29, near=0)
    yield Comparison("one tile at the end of four: 1 + 2 + 2", calls(part("causal"), row(2, start=6), row(8)), 5, near=0)


@contextmanager
def _counting_at_most(most: int) -> Iterator[None]:
    """Lower the number of scores that are counted one by one, so that short sequences are sampled like long ones."""
    default, counted.MAX_COUNTED = counted.MAX_COUNTED, most
    try:
        yield
    finally:
        counted.MAX_COUNTED = default


def _count(mask: Any, n: int, most: int) -> tuple[int, _Watched]:
    watched: Any = _Watched(mask)
    with _counting_at_most(most):
        return pairs(watched, n), watched


@oracle("causal", "strided", "by_head")
def exact_pairs() -> Iterator[Comparison]:
    """Few partial scores are counted one by one, so that the count is exact."""
    causal, third = part("causal"), part("strided", step=3)
    halves = part("by_head", masks=(part("window", size=1), causal))
    yield Comparison("half of the heads 20, half 210", pairs(halves, 20), 115, near=0)
    yield Comparison("residues of 171, 171, 170", pairs(third, 512), 87382, near=0)
    # 1 + 2 + … + 7 in each of 585 blocks: no multiple of any tile
    yield Comparison("blocks of 7, causal", pairs(causal & part("block_local", size=7), 4095), 16380, near=0)
    yield Comparison("1,000 tokens", pairs(causal, 1000), 500500, near=0)
    yield Comparison("one token", pairs(causal, 1), 1, near=0)


@oracle("causal")
def sampled_pairs() -> Iterator[Comparison]:
    """Tiles have at least 64 tokens, and there are at most 64. Beyond MAX_COUNTED partial scores only an even number of queries
    per tile is counted, as many as MAX_COUNTED allows if all tiles were partial. Counts are within 1 %."""
    causal, third = part("causal"), part("strided", step=3)
    # eight tiles on the diagonal: 8·64·64 scores, exactly the limit
    found, watched = _count(causal, 512, 32768)
    yield Comparison("at the limit", [found, watched.scores], [131328, 32768], near=0)
    # one score too many: 32767 // (8·512) = 7, so 6 queries of each tile; linear growth is counted exactly
    found, watched = _count(causal, 512, 32767)
    yield Comparison("beyond the limit", [found, watched.scores], [131328, 3072], near=0)
    # all 64 tiles partial, 8 queries of each row of tiles
    found, watched = _count(third, 512, 32768)
    yield Comparison("8 queries per tile", watched.scores, 32768, near=0)
    yield Comparison("about a third", found, 87382, near=0.01)
    # the k-th query is at the fraction k·0.618034 of its tile: .618 .236 .854 .472 | .090 .708 .326 .944, and mirrored
    tiles = [[39, 15, 54, 30, 24, 48, 9, 33], [69, 109, 84, 124, 122, 82, 107, 67]]
    yield Comparison("the sampled queries", watched.queries[:2], tiles, near=0)
    # 8 heads: 8 queries again for eight times as many scores
    found, watched = _count(part("by_head", masks=(third, causal)), 512, 262144)
    yield Comparison("8 heads", watched.scores, 262144, near=0)
    yield Comparison("half 87382, half 131328", found, 109355, near=0.01)
    # 2·32768 // 4096 = 16 tiles of 256, two queries each; 2·8192 // 4096 = 4, but never fewer than 8, of 512
    for most, scores in ((32768, 131072), (8192, 65536)):
        found, watched = _count(third, 4096, most)
        yield Comparison(f"two queries per tile, {most}", watched.scores, scores, near=0)
        yield Comparison(f"1366·1366 + 2·1365·1365, {most}", found, 5592406, near=0.01)
    # 8 heads: 2·32768 // (2048·8) = 4, so 8 tiles of 256, two queries of each
    found, watched = _count(part("by_head", masks=(third, causal)), 2048, 32768)
    yield Comparison("two queries, 8 heads", watched.scores, 262144, near=0)
    # at most 64 tiles, of 128, and two queries of each, for the one tile on the diagonal
    found, watched = _count(causal, 8192, 2**19)
    yield Comparison("64 tiles", [found, len(watched.queries), watched.scores], [33558528, 64, 16384], near=0)


def _text(where: Where) -> str:
    if isinstance(where, slice):
        return f"{where.start}:{where.stop}:{where.step}"
    return ",".join(str(token) for token in where.tolist())


@oracle("strided")
def regrouped() -> Iterator[Comparison]:
    """Eight tokens sorted by residue: 0 2 4 6 1 3 5 7. Evenly spaced neighbors are a slice."""
    even, plain, third = TileOrder(row(8), 2), TileOrder(row(8), 1), TileOrder(row(8), 3)
    cases: list[tuple[TileOrder, list[tuple[int, int]], str]] = [
        (even, [(0, 2)], "0:3:2"),
        (even, [(2, 4)], "4:7:2"),
        (even, [(4, 6)], "1:4:2"),
        (even, [(5, 6)], "3:4:2"),
        (even, [(3, 5)], "6,1"),
        (even, [(2, 6)], "4,6,1,3"),
        (even, [(0, 2), (2, 4)], "0:7:2"),
        (even, [(0, 2), (4, 5)], "0,2,1"),
        (third, [(0, 3)], "0:7:3"),  # 0 3 6 1 4 7 2 5
        (third, [(4, 6)], "4:8:3"),
        (third, [(2, 4)], "6,1"),
        (third, [(1, 7)], "3,6,1,4,7,2"),
        (plain, [(2, 4)], "2:4:1"),
        (plain, [(2, 4), (4, 7)], "2:7:1"),
        (plain, [(0, 2), (5, 6)], "0,1,5"),
    ]
    for tokens, places, text in cases:
        runs = [TileRun(begin, end, True) for begin, end in places]
        yield Comparison(f"step {tokens.step}, {places}", _text(tokens.where(runs)), text)
    late = TileOrder(row(5, start=3), 2)  # orders 3 4 5 6 7: the even ones, 4 and 6, come first
    yield Comparison("by order, not by index", _text(late.where([TileRun(0, 3, True)])), "1,3,0")
    # tokens of one residue see half of the keys: 4 tiles of 2 queries by 4 keys; unsorted it would be 64 scores
    tiling = Tiling(part("strided", step=2), row(8), row(8), 1, 2, 3)
    yield Comparison("scores touched", tiling.touched(), 32, near=0)
    tiles = ["0:3:2 | 0:5:2 | 6:7:2", "4:7:2 | 0:5:2 | 6:7:2", "1:4:2 | 1:6:2 | 7:8:2", "5:8:2 | 1:6:2 | 7:8:2"]
    yield Comparison("tiles", [_tile(tile) for tile in tiling.tiles], tiles)
    # a single query is not sorted
    one = Tiling(part("strided", step=2), row(1, start=7), row(8), 1, 2, 8)
    yield Comparison("one query", [_tile(tile) for tile in one.tiles], ["0:1:1 | 0:8:1 masked 0–8 at 0–8"])


def _tile(tile: Any) -> str:
    """The queries of a tile, then its pieces."""
    return " | ".join([_text(tile.queries), *(_piece(piece) for piece in tile.pieces)])


def _piece(piece: Any) -> str:
    masked = [
        f" masked {run.begin}–{run.end} at {columns.start}–{columns.stop}"
        for run, columns in zip(piece.masked, piece.columns, strict=True)
    ]
    return _text(piece.keys) + "".join(masked)


@oracle("causal")
def pieces() -> Iterator[Comparison]:
    """Tiles of two over seven tokens, in pieces of three keys; the runs that are masked, and their columns in the piece."""
    tiling = Tiling(part("causal"), row(7), row(7), 1, 2, 3)
    tiles = [
        "0:2:1 | 0:2:1 masked 0–2 at 0–2",
        "2:4:1 | 0:3:1 masked 2–3 at 2–3 | 3:4:1 masked 3–4 at 0–1",
        "4:6:1 | 0:3:1 | 3:6:1 masked 4–6 at 1–3",
        "6:7:1 | 0:3:1 | 3:6:1 | 6:7:1",
    ]
    yield Comparison("causal", [_tile(tile) for tile in tiling.tiles], tiles)
    yield Comparison("scores touched: 2·(2 + 4 + 6 + 7)", tiling.touched(), 38, near=0)
    # the first key and the last two: keys that are not neighbors are in one piece
    tiling = Tiling(part("causal") & part("window", size=2, keep=1), row(8), row(8), 1, 2, 16)
    last = "6:8:1 | 0,1,4,5,6,7 masked 0–2 at 0–2 masked 4–8 at 2–6"
    yield Comparison("a window", _tile(tiling.tiles[-1]), last)


@oracle("causal")
def entries() -> Iterator[Comparison]:
    """take, put and add, with a slice and with an index."""
    x = torch.arange(10.0).view(5, 2)
    for where in (slice(1, 5, 2), torch.tensor([1, 3])):
        yield Comparison(f"taken, {_text(where)}", take(x, where), [[2.0, 3.0], [6.0, 7.0]])
        changed = x.clone()
        put(changed, where, torch.tensor([[10.0, 20.0], [30.0, 40.0]]))
        yield Comparison(f"set, {_text(where)}", changed.flatten(), [0.0, 1.0, 10.0, 20.0, 4.0, 5.0, 30.0, 40.0, 8.0, 9.0])
        add(changed, where, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        yield Comparison(f"added, {_text(where)}", changed.flatten(), [0.0, 1.0, 11.0, 22.0, 4.0, 5.0, 33.0, 44.0, 8.0, 9.0])
