"""Oracles of masks, drawn as strings: one row per query, # where it sees the key, · where it does not. The same for tiles of
2 × 2 over eight tokens, + for a partial tile; and tiles never contradict the mask.

A window of w includes the query: with w = 4, position 9 sees 6, 7, 8, 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.nn.groups import Fill
from dovetail.nn.layout import TokenLayout
from dovetail.ops.mask import allowed, pairs, plan, spans
from dovetail.proof.laws.oracle import Comparison, oracle, part, row

HEADS = 4
SIGNS = {Fill.FULL: "#", Fill.PART: "+", Fill.EMPTY: "·"}


def _drawn(mask: Any, n: int, head: int = 0) -> list[str]:
    """The mask of n tokens, one string per query."""
    visible = mask.visible(row(n), row(n), torch.arange(HEADS))
    return ["".join("#" if on else "·" for on in line) for line in visible[0, min(head, visible.shape[1] - 1)].tolist()]


def _sees(mask: Any, position: int, n: int = 12) -> list[int]:
    """The keys that one query sees."""
    visible = mask.visible(row(1, start=position), row(n), torch.arange(HEADS))
    return visible[0, 0, 0].nonzero().flatten().tolist()


def _tiles(mask: Any, n: int = 8, size: int = 2) -> list[str]:
    """`mask.tile` of each tile, one string per tile of queries."""
    runs = spans(row(n), size, mask.regroup())
    return ["".join(SIGNS[mask.tile(q, k, 0)] for k in runs) for q in runs]


def _contradictions(mask: Any) -> int:
    """The number of pairs for which tiles and mask disagree, over several tile sizes and layouts."""
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


def _properties(mask: Any) -> list[Any]:
    """The declared properties of a mask."""
    return [mask.order(), mask.reach(), mask.kept(), mask.relative(), mask.regroup(), mask.flag()]


def _compare(mask: Any, rows: list[str], tiles: list[str], properties: list[Any]) -> Iterator[Comparison]:
    """The drawing, the tiles, and the properties: order, reach, kept first tokens, whether it depends on the distance alone,
    the modulus of its residues, and the flag of kernels."""
    yield Comparison("drawn", _drawn(mask, len(rows)), rows)
    yield Comparison("tiles", _tiles(mask), tiles)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _properties(mask), properties)
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)


@oracle("full")
def full() -> Iterator[Comparison]:
    """Every token of the document."""
    yield from _compare(part("full"), ["###", "###", "###"], ["####"] * 4, ["both", None, 0, True, 1, "all"])


@oracle("causal")
def causal() -> Iterator[Comparison]:
    """The token itself and earlier ones."""
    yield from _compare(
        part("causal"),
        ["#···", "##··", "###·", "####"],
        ["+···", "#+··", "##+·", "###+"],
        ["causal", None, 0, True, 1, "causal"],
    )
    yield Comparison("tiles of one", _tiles(part("causal"), 3, 1), ["#··", "##·", "###"])
    # documents, padding and rows of a flat batch are separate whatever the mask
    layout = TokenLayout.packed([[2, 1]], 4)
    visible = allowed(part("causal"), layout, layout, torch.arange(1))[0, 0].int()
    yield Comparison("two documents and padding", visible, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], near=0)
    flat = TokenLayout.flat([2, 1])
    rows = allowed(part("causal"), flat, flat, torch.arange(1))[0].int()
    yield Comparison("two rows, flat", rows, [[1, 0, 0], [1, 1, 0], [0, 0, 1]], near=0)


@oracle("window")
def window() -> Iterator[Comparison]:
    """The nearest `size` tokens, the query included, and the first `keep`."""
    two = ["##···", "###··", "·###·", "··###", "···##"]
    yield from _compare(part("window", size=2), two, ["#+··", "+#+·", "·+#+", "··+#"], ["both", 2, 0, True, 1, None])
    kept = ["##···", "###··", "####·", "#·###", "#··##"]
    yield from _compare(part("window", size=2, keep=1), kept, ["#+··", "+#+·", "++#+", "+·+#"], ["both", 2, 1, False, 1, None])
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
    """Every query sees the first tokens."""
    yield from _compare(
        part("prefix", length=2), ["##··", "##··", "##··", "##··"], ["#···"] * 4, ["both", 2, 2, False, 1, None]
    )
    joined = part("causal") | part("prefix", length=3)
    rows = ["###··", "###··", "###··", "####·", "#####"]
    yield from _compare(joined, rows, ["#+··", "#+··", "##+·", "###+"], ["ahead", None, 3, False, 1, None])


@oracle("global_tokens")
def global_tokens() -> Iterator[Comparison]:
    """The first tokens see every token, and every token sees them."""
    one = ["####", "#···", "#···", "#···"]
    yield from _compare(part("global_tokens", tokens=1), one, ["++++", "+···", "+···", "+···"], ["both", 1, 1, False, 1, None])
    longformer = part("global_tokens", tokens=2) | part("window", size=2)
    rows = ["#####", "#####", "####·", "#####", "##·##"]
    yield from _compare(longformer, rows, ["####", "##+·", "#+#+", "#·+#"], ["both", 2, 2, False, 1, None])


@oracle("block_local")
def block_local() -> Iterator[Comparison]:
    """The query's own block, and `back` more on either side."""
    two = ["##···", "##···", "··##·", "··##·", "····#"]
    yield from _compare(part("block_local", size=2), two, ["#···", "·#··", "··#·", "···#"], ["both", 2, 0, False, 1, None])
    back = ["####··", "####··", "######", "######", "··####", "··####"]
    yield from _compare(
        part("block_local", size=2, back=1), back, ["##··", "###·", "·###", "··##"], ["both", 4, 0, False, 1, None]
    )
    yield Comparison("tiles across blocks of 3", _tiles(part("block_local", size=3)), ["#+··", "+++·", "·+#·", "···#"])


@oracle("strided")
def strided() -> Iterator[Comparison]:
    """Every step-th token from the query on; a tile with one residue is full or empty."""
    rows = ["#··#·", "·#··#", "··#··", "#··#·", "·#··#"]
    yield from _compare(part("strided", step=3), rows, ["++++"] * 4, ["both", None, 0, True, 3, None])
    yield Comparison("tiles of one", _tiles(part("strided", step=3), 5, 1), rows)


@oracle("dilated")
def dilated() -> Iterator[Comparison]:
    """A dilated window."""
    holes = ["#·#···", "·#·#··", "#·#·#·", "·#·#·#", "··#·#·", "···#·#"]
    mask = part("dilated", size=2, step=2)
    yield Comparison("drawn", _drawn(mask, 6), holes)
    yield Comparison("tiles of one", _tiles(mask, 6, 1), holes)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _properties(mask), ["both", 3, 0, True, 2, None])
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)
    back = part("causal") & part("dilated", size=3, step=3)
    yield Comparison("3 tokens, 3 apart, position 10", _sees(back, 10), [4, 7, 10], near=0)


@oracle("random_blocks")
def random_blocks() -> Iterator[Comparison]:
    """Blocks a ≥ b see each other if b = h(seed, a, i) mod (a + 1), computed with plain integers. The picks are fixed here: a
    change of the hash would change the masks of trained models."""
    one = ["#·#····", "·#·····", "#······", "···#···", "····#·#", "·····#·", "····#··"]
    yield Comparison("one pick", _drawn(part("random_blocks", size=1, count=1), 7), one)
    two = ["######···", "######···", "####··###", "####··###", "##··##··#", "##··##··#", "··##··##·", "··##··##·", "··####···"]
    yield from _compare(
        part("random_blocks", size=2, count=2, seed=7), two, ["###·", "##·#", "#·#·", "·#·#"], ["both", None, 0, False, 1, None]
    )
    yield Comparison("tiles of one", _tiles(part("random_blocks", size=2, count=2, seed=7), 9, 1), two)


@oracle("all_of")
def all_of() -> Iterator[Comparison]:
    """The keys that all masks allow."""
    mask = part("all_of", masks=(part("causal"), part("window", size=2), part("block_local", size=3)))
    rows = ["#····", "##···", "·##··", "···#·", "···##"]
    yield from _compare(mask, rows, ["+···", "++··", "·++·", "···+"], ["causal", 2, 0, False, 1, None])
    columns = part("causal") & part("strided", step=3)
    yield Comparison("kind of a & b", columns.kind, "all_of")
    yield Comparison(
        "columns: order, reach, kept, relative, regrouped by", _properties(columns)[:5], ["causal", None, 0, True, 3]
    )
    yield Comparison("order with a prefix", (part("prefix") & part("window")).order(), "both")


@oracle("any_of")
def any_of() -> Iterator[Comparison]:
    """The keys that at least one mask allows."""
    mask = part("any_of", masks=(part("window", size=1), part("block_local", size=3), part("prefix", length=2)))
    rows = ["###··", "###··", "###··", "##·##", "##·##"]
    yield from _compare(mask, rows, ["#+··", "#++·", "#+#·", "#··#"], ["both", 3, 2, False, 1, None])
    yield Comparison("kind of a | b", (part("causal") | part("strided", step=2)).kind, "any_of")
    first = part("any_of", masks=(part("strided", step=3), part("window", size=1)))
    yield Comparison("a sparse mask in first place", _drawn(first, 4), ["#··#", "·#··", "··#·", "#··#"])


@oracle("by_head")
def by_head() -> Iterator[Comparison]:
    """Heads 0 and 2 have the first mask, heads 1 and 3 the second."""
    mask = part("by_head", masks=(part("window", size=1), part("causal")))
    even, odd = ["#··", "·#·", "··#"], ["#··", "##·", "###"]
    for head, rows in enumerate((even, odd, even, odd)):
        yield Comparison(f"head {head}", _drawn(mask, 3, head), rows)
    yield Comparison("order, reach, kept, relative, regrouped by, flag", _properties(mask), ["both", None, 0, True, 1, None])
    yield Comparison("tiles that contradict it", _contradictions(mask), 0, near=0)
    # a rank with heads 1 and 3 uses their numbers in the whole model
    odd_heads = mask.visible(row(3), row(3), torch.tensor([1, 3]))[0, 0].int()
    yield Comparison("heads 1 and 3 alone", odd_heads, [[1, 0, 0], [1, 1, 0], [1, 1, 1]], near=0)
    both_causal = part("by_head", masks=(part("causal"), part("causal") & part("window", size=3)))
    yield Comparison("order of causal heads", both_causal.order(), "causal")
