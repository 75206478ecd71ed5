"""Blocks of tokens: looked up by document in any layout; the gathered form equals the masked one, at any chunk size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.ops import implementation
from dovetail.ops.blocks import LONGEST, attend_picked, ended, find

SIZE, HEADS, GROUPS, HEAD = 3, 6, 2, 5


def brute(layout: TokenLayout) -> set[tuple[int, ...]]:
    """(row, document, number, places of its tokens …) of each whole block, by looking at every token."""
    found = set()
    rows = layout.order.view(-1, layout.n)
    seg = layout.seg.view(-1, layout.n)
    whose = torch.arange(len(rows))[:, None].expand_as(rows) if layout.row is None else layout.row[None]
    for r in range(len(rows)):
        blocks: dict[tuple[int, int, int], dict[int, int]] = {}
        for place in range(layout.n):
            if seg[r, place] >= 0:
                order = int(rows[r, place])
                name = int(whose[r, place]), int(seg[r, place]), order // SIZE
                blocks.setdefault(name, {})[order % SIZE] = place
        found |= {(*name, *(tokens[i] for i in range(SIZE))) for name, tokens in blocks.items() if len(tokens) == SIZE}
    return found


def listed(layout: TokenLayout) -> set[tuple[int, ...]]:
    blocks = ended(layout, layout, SIZE)
    rows = 1 if layout.row is not None else len(layout.order)
    numbers, seg = (x.view(rows, blocks.layout.n) for x in (blocks.layout.order, blocks.layout.seg))
    tokens, found = blocks.tokens.view(rows, blocks.layout.n, SIZE), set()
    for r in range(len(numbers)):
        for b in range(blocks.layout.n):
            if seg[r, b] >= 0:
                row = r if blocks.layout.row is None else int(blocks.layout.row[b])
                found.add((row, int(seg[r, b]), int(numbers[r, b]), *tokens[r, b].tolist()))
    return found


LAYOUTS = {
    "whole": TokenLayout.whole(2, 10),
    "shorter than a block": TokenLayout.whole(2, 2),
    "packed": TokenLayout.packed([(4, 6), (2, 1, 6), (7, 3)], 10),
    "padded left": TokenLayout.padded([10, 4, 2], 10, left=True),
    "padded right": TokenLayout.padded([9, 10, 1], 10),
    "flat": TokenLayout.flat([4, 1, 9]),
    "flat, mixed up": TokenLayout.flat([4, 6]).pick(torch.tensor([4, 0, 1, 5, 6, 2, 7, 8, 3, 9])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_counted_within_a_document(name: str) -> None:
    assert listed(LAYOUTS[name]) == brute(LAYOUTS[name])


def test_a_block_that_began_before_the_call_is_found_whole() -> None:
    layout, key_layout = TokenLayout.whole(2, 4, start=4), TokenLayout.whole(2, 8)  # tokens 4 … 7 of which 5 ends block 1
    blocks = ended(layout, key_layout, SIZE)
    assert blocks.layout.order.tolist() == [[1], [1]]
    assert blocks.tokens.tolist() == [[[3, 4, 5]]] * 2


def test_tokens_are_found_by_document_and_order_or_not_at_all() -> None:
    layout = TokenLayout.packed([(4, 3)], 8)
    document, order = torch.tensor([[0, 1, 1, 2, 0, -1]]), torch.tensor([[3, 0, 2, 0, 4, 0]])
    places, here = find(layout, document, order)
    assert here.tolist() == [[True, True, True, False, False, False]]
    assert places[here].tolist() == [3, 4, 6]
    assert LONGEST > 2**31


def picks(layout: TokenLayout, count: int) -> Tensor:
    """Random blocks up to each query's own, some of them none, no block twice."""
    torch.manual_seed(1)
    own = layout.order // SIZE
    drawn = torch.rand(*own.shape[:-1], GROUPS, own.shape[-1], count + 4).argsort(-1)[..., :count] - 1
    return torch.where(drawn <= own[..., None, :, None], drawn, -1)


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_is_dense(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CHUNK", chunk)
    layout = LAYOUTS[name]
    torch.manual_seed(0)
    q = torch.randn(*layout.order.shape, HEADS, HEAD, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*layout.order.shape, GROUPS, HEAD, dtype=torch.float64, requires_grad=True) for _ in range(2))
    picked, answers = picks(layout, 2), []
    for how in ("reference", "torch"):
        with implementation.using(how):
            z = attend_picked(q, k, v, picked, SIZE, 0.7, layout, layout)
        answers.append([z, *torch.autograd.grad(z.sin().sum(), (q, k, v))])
    for got, want in zip(*answers, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max() < 1e-12


def test_gathering_never_reads_other_blocks() -> None:
    layout, n = TokenLayout.whole(1, 300), 300
    q, k = torch.randn(1, n, HEADS, HEAD), torch.randn(1, n, GROUPS, HEAD)
    picked = torch.tensor([0, 99]).expand(1, GROUPS, 1, 2)
    last = layout.pick(slice(n - 1, n))
    seen = (layout.order // SIZE == 0) | (layout.order // SIZE == 99)
    poisoned = torch.where(seen[..., None, None], k, torch.nan)
    got = attend_picked(q[:, -1:], poisoned, poisoned, picked, SIZE, 0.7, last, layout)
    with implementation.using("reference"):
        want = attend_picked(q[:, -1:], k, k, picked, SIZE, 0.7, last, layout)
    assert (got - want).abs().max() < 1e-5
