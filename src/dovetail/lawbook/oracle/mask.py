"""Masks drawn: a row for each query, # where it sees the key, · where it does not. The same for tiles of 2 × 2 over eight
tokens, + where a tile is seen in part; and tiles never contradict the mask.

A window of w counts the token itself: at w = 4 position 9 sees 6, 7, 8, 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.core.group import Fill
from dovetail.core.layout import TokenLayout
from dovetail.lawbook.oracle.registry import Comparison, oracle
from dovetail.lawbook.oracle.stand import part, row
from dovetail.ops.mask import allowed, pairs, plan, spans

HEADS = 4
SIGNS = {Fill.FULL: "#", Fill.PART: "+", Fill.EMPTY: "·"}


def _drawn(mask: Any, n: int, head: int = 0) -> list[str]:
    """What each of n queries sees, as one text a row."""
    seen = mask.visible(row(n), row(n), torch.arange(HEADS))
    return ["".join("#" if on else "·" for on in line) for line in seen[0, min(head, seen.shape[1] - 1)].tolist()]


def _sees(mask: Any, position: int, n: int = 12) -> list[int]:
    """The keys one query sees."""
    seen = mask.visible(row(1, start=position), row(n), torch.arange(HEADS))
    return seen[0, 0, 0].nonzero().flatten().tolist()


def _tiles(mask: Any, n: int = 8, size: int = 2) -> list[str]:
    """What the mask says of each tile without looking inside."""
    runs = spans(row(n), size, mask.regroup())
    return ["".join(SIGNS[mask.tile(q, k, 0)] for k in runs) for q in runs]


def _contradictions(mask: Any) -> int:
    """Pairs for which the tiles say one thing and the mask another, over several tile sizes and ways to lay out tokens."""
    wrong = 0
    for layout in (row(23), TokenLayout.packed([[9, 11], [20]], 23), TokenLayout.flat([7, 1, 12], [0, 5, 3])):
        true = allowed(mask, layout, layout, torch.arange(HEADS))
        true = true.expand(*true.shape[:-3], HEADS, -1, -1)
        for size in (1, 3, 4, 8):
            for i, runs in enumerate(plan(mask, layout, layout, HEADS, size, size)):
                block = true[..., i * size : (i + 1) * size, :]
                touched = torch.zeros(layout.n, dtype=torch.bool)
                for run in runs:
                    touched[run.begin : run.end] = True
                    wrong += int((~block[..., run.begin : run.end]).sum()) if run.full else 0
                wrong += int(block[..., ~touched].sum())
    return wrong


def _said(mask: Any) -> list[Any]:
    """What the mask says of itself."""
    return [mask.order(), mask.reach(), mask.kept(), mask.relative(), mask.regroup(), mask.flag()]


def _hold(mask: Any, rows: list[str], tiles: list[str], says: list[Any]) -> Iterator[Comparison]:
    """The drawing, the tiles, and what the mask says of itself: order, reach, how many first tokens are kept, whether the
    distance alone decides, modulo what tokens see only each other, and the flag that kernels know it by."""
    yield Comparison("drawn", _drawn(mask, len(rows)), rows)
    yield Comparison("tiles", _tiles(mask), tiles)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _said(mask), says)
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)


@oracle("full")
def full() -> Iterator[Comparison]:
    """All of the document."""
    yield from _hold(part("full"), ["###", "###", "###"], ["####"] * 4, ["both", None, 0, True, 1, "all"])


@oracle("causal")
def causal() -> Iterator[Comparison]:
    """Itself and what came before."""
    yield from _hold(
        part("causal"),
        ["#···", "##··", "###·", "####"],
        ["+···", "#+··", "##+·", "###+"],
        ["causal", None, 0, True, 1, "causal"],
    )
    yield Comparison("tiles of one", _tiles(part("causal"), 3, 1), ["#··", "##·", "###"])
    # documents, padding and rows of a flat batch are separate whatever the mask
    layout = TokenLayout.packed([[2, 1]], 4)
    seen = allowed(part("causal"), layout, layout, torch.arange(1))[0, 0].int()
    yield Comparison("two documents and padding", seen, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], near=0)
    flat = TokenLayout.flat([2, 1])
    rows = allowed(part("causal"), flat, flat, torch.arange(1))[0].int()
    yield Comparison("two rows, flat", rows, [[1, 0, 0], [1, 1, 0], [0, 0, 1]], near=0)


@oracle("window")
def window() -> Iterator[Comparison]:
    """The nearest, itself counted; the first `keep` for ever."""
    two = ["##···", "###··", "·###·", "··###", "···##"]
    yield from _hold(part("window", size=2), two, ["#+··", "+#+·", "·+#+", "··+#"], ["both", 2, 0, True, 1, None])
    kept = ["##···", "###··", "####·", "#·###", "#··##"]
    yield from _hold(part("window", size=2, keep=1), kept, ["#+··", "+#+·", "++#+", "+·+#"], ["both", 2, 1, False, 1, None])
    near = part("causal") & part("window", size=4)
    yield Comparison("w = 4, position 9", _sees(near, 9), [6, 7, 8, 9], near=0)
    yield Comparison("pairs of 10 tokens", [pairs(part("causal"), 10), pairs(near, 10)], [55, 34], near=0)  # 1 + 2 + 3 + 7·4
    far = part("causal") & part("window", size=64)
    yield Comparison("pairs of 1,000 tokens", pairs(far, 1000), 61984, near=0)  # 64·65/2 + 936·64
    yield Comparison("w = 1, position 9", _sees(part("causal") & part("window", size=1), 9), [9], near=0)
    streaming = part("causal") & part("window", size=3, keep=2)
    yield Comparison("w = 3, keep 2, position 9", _sees(streaming, 9), [0, 1, 7, 8, 9], near=0)


@oracle("prefix")
def prefix() -> Iterator[Comparison]:
    """The first tokens, seen by all."""
    yield from _hold(part("prefix", length=2), ["##··", "##··", "##··", "##··"], ["#···"] * 4, ["both", 2, 2, False, 1, None])
    joined = part("causal") | part("prefix", length=3)
    rows = ["###··", "###··", "###··", "####·", "#####"]
    yield from _hold(joined, rows, ["#+··", "#+··", "##+·", "###+"], ["ahead", None, 3, False, 1, None])


@oracle("global_tokens")
def global_tokens() -> Iterator[Comparison]:
    """The first tokens see all and are seen by all."""
    one = ["####", "#···", "#···", "#···"]
    yield from _hold(part("global_tokens", tokens=1), one, ["++++", "+···", "+···", "+···"], ["both", 1, 1, False, 1, None])
    longformer = part("global_tokens", tokens=2) | part("window", size=2)
    rows = ["#####", "#####", "####·", "#####", "##·##"]
    yield from _hold(longformer, rows, ["####", "##+·", "#+#+", "#·+#"], ["both", 2, 2, False, 1, None])


@oracle("block_local")
def block_local() -> Iterator[Comparison]:
    """Its own block, and `back` more on either side."""
    two = ["##···", "##···", "··##·", "··##·", "····#"]
    yield from _hold(part("block_local", size=2), two, ["#···", "·#··", "··#·", "···#"], ["both", 2, 0, False, 1, None])
    back = ["####··", "####··", "######", "######", "··####", "··####"]
    yield from _hold(
        part("block_local", size=2, back=1), back, ["##··", "###·", "·###", "··##"], ["both", 4, 0, False, 1, None]
    )
    yield Comparison("tiles across blocks of 3", _tiles(part("block_local", size=3)), ["#+··", "+++·", "·+#·", "···#"])


@oracle("strided")
def strided() -> Iterator[Comparison]:
    """Every step-th, itself counted; tiles are known where a tile holds one residue."""
    rows = ["#··#·", "·#··#", "··#··", "#··#·", "·#··#"]
    yield from _hold(part("strided", step=3), rows, ["++++"] * 4, ["both", None, 0, True, 3, None])
    yield Comparison("tiles of one", _tiles(part("strided", step=3), 5, 1), rows)


@oracle("dilated")
def dilated() -> Iterator[Comparison]:
    """A window with holes."""
    holes = ["#·#···", "·#·#··", "#·#·#·", "·#·#·#", "··#·#·", "···#·#"]
    mask = part("dilated", size=2, step=2)
    yield Comparison("drawn", _drawn(mask, 6), holes)
    yield Comparison("tiles of one", _tiles(mask, 6, 1), holes)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _said(mask), ["both", 3, 0, True, 2, None])
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)
    back = part("causal") & part("dilated", size=3, step=3)
    yield Comparison("3 tokens, 3 apart, position 10", _sees(back, 10), [4, 7, 10], near=0)


@oracle("random_blocks")
def random_blocks() -> Iterator[Comparison]:
    """The pair of blocks a ≥ b is on if b = h(seed, a, i) mod (a + 1), worked out with plain whole numbers. The picks are
    frozen here: were the hash to change, old models would see other things."""
    one = ["#·#····", "·#·····", "#······", "···#···", "····#·#", "·····#·", "····#··"]
    yield Comparison("one pick", _drawn(part("random_blocks", size=1, count=1), 7), one)
    two = ["######···", "######···", "####··###", "####··###", "##··##··#", "##··##··#", "··##··##·", "··##··##·", "··####···"]
    yield from _hold(
        part("random_blocks", size=2, count=2, seed=7), two, ["###·", "##·#", "#·#·", "·#·#"], ["both", None, 0, False, 1, None]
    )
    yield Comparison("tiles of one", _tiles(part("random_blocks", size=2, count=2, seed=7), 9, 1), two)


@oracle("all_of")
def all_of() -> Iterator[Comparison]:
    """What every one lets through."""
    mask = part("all_of", masks=(part("causal"), part("window", size=2), part("block_local", size=3)))
    rows = ["#····", "##···", "·##··", "···#·", "···##"]
    yield from _hold(mask, rows, ["+···", "++··", "·++·", "···+"], ["causal", 2, 0, False, 1, None])
    columns = part("causal") & part("strided", step=3)
    yield Comparison("& makes it", columns.kind, "all_of")
    yield Comparison("columns: order, reach, kept, relative, regrouped by", _said(columns)[:5], ["causal", None, 0, True, 3])
    yield Comparison("order with a prefix", (part("prefix") & part("window")).order(), "both")


@oracle("any_of")
def any_of() -> Iterator[Comparison]:
    """What at least one lets through."""
    mask = part("any_of", masks=(part("window", size=1), part("block_local", size=3), part("prefix", length=2)))
    rows = ["###··", "###··", "###··", "##·##", "##·##"]
    yield from _hold(mask, rows, ["#+··", "#++·", "#+#·", "#··#"], ["both", 3, 2, False, 1, None])
    yield Comparison("| makes it", (part("causal") | part("strided", step=2)).kind, "any_of")
    first = part("any_of", masks=(part("strided", step=3), part("window", size=1)))
    yield Comparison("every third counts though it stands first", _drawn(first, 4), ["#··#", "·#··", "··#·", "#··#"])


@oracle("by_head")
def by_head() -> Iterator[Comparison]:
    """Heads 0 and 2 see by the first mask, 1 and 3 by the second."""
    mask = part("by_head", masks=(part("window", size=1), part("causal")))
    even, odd = ["#··", "·#·", "··#"], ["#··", "##·", "###"]
    for head, rows in enumerate((even, odd, even, odd)):
        yield Comparison(f"head {head}", _drawn(mask, 3, head), rows)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _said(mask), ["both", None, 0, True, 1, None])
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)
    # a rank that holds heads 1 and 3 alone sees by their own numbers
    held = mask.visible(row(3), row(3), torch.tensor([1, 3]))[0, 0].int()
    yield Comparison("heads 1 and 3 alone", held, [[1, 0, 0], [1, 1, 0], [1, 1, 1]], near=0)
    alike = part("by_head", masks=(part("causal"), part("causal") & part("window", size=3)))
    yield Comparison("order of causal heads", alike.order(), "causal")
