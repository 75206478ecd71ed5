"""Blocks of tokens: found by document wherever their tokens lie; what is gathered equals what is masked, at any chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.core.at import At
from dovetail.ops import form
from dovetail.ops.blocks import LONGEST, attend_picked, ended, find

SIZE, HEADS, GROUPS, HEAD = 3, 6, 2, 5


def brute(at: At) -> set[tuple[int, ...]]:
    """(row, document, number, places of its tokens …) of each whole block, by looking at every token."""
    found = set()
    rows = at.order.view(-1, at.n)
    seg = at.seg.view(-1, at.n)
    whose = torch.arange(len(rows))[:, None].expand_as(rows) if at.row is None else at.row[None]
    for r in range(len(rows)):
        blocks: dict[tuple[int, int, int], dict[int, int]] = {}
        for place in range(at.n):
            if seg[r, place] >= 0:
                order = int(rows[r, place])
                name = int(whose[r, place]), int(seg[r, place]), order // SIZE
                blocks.setdefault(name, {})[order % SIZE] = place
        found |= {(*name, *(tokens[i] for i in range(SIZE))) for name, tokens in blocks.items() if len(tokens) == SIZE}
    return found


def listed(at: At) -> set[tuple[int, ...]]:
    blocks = ended(at, at, SIZE)
    rows = 1 if at.row is not None else len(at.order)
    numbers, seg = (x.view(rows, blocks.at.n) for x in (blocks.at.order, blocks.at.seg))
    tokens, found = blocks.tokens.view(rows, blocks.at.n, SIZE), set()
    for r in range(len(numbers)):
        for b in range(blocks.at.n):
            if seg[r, b] >= 0:
                row = r if blocks.at.row is None else int(blocks.at.row[b])
                found.add((row, int(seg[r, b]), int(numbers[r, b]), *tokens[r, b].tolist()))
    return found


LAYOUTS = {
    "whole": At.whole(2, 10),
    "shorter than a block": At.whole(2, 2),
    "packed": At.packed([(4, 6), (2, 1, 6), (7, 3)], 10),
    "padded left": At.padded([10, 4, 2], 10, left=True),
    "padded right": At.padded([9, 10, 1], 10),
    "flat": At.flat([4, 1, 9]),
    "flat, mixed up": At.flat([4, 6]).pick(torch.tensor([4, 0, 1, 5, 6, 2, 7, 8, 3, 9])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_counted_within_a_document(name: str) -> None:
    assert listed(LAYOUTS[name]) == brute(LAYOUTS[name])


def test_a_block_that_began_before_the_call_is_found_whole() -> None:
    at, key_at = At.whole(2, 4, start=4), At.whole(2, 8)  # tokens 4 … 7 of which 5 ends block 1
    blocks = ended(at, key_at, SIZE)
    assert blocks.at.order.tolist() == [[1], [1]]
    assert blocks.tokens.tolist() == [[[3, 4, 5]]] * 2


def test_tokens_are_found_by_document_and_order_or_not_at_all() -> None:
    at = At.packed([(4, 3)], 8)
    document, order = torch.tensor([[0, 1, 1, 2, 0, -1]]), torch.tensor([[3, 0, 2, 0, 4, 0]])
    places, here = find(at, document, order)
    assert here.tolist() == [[True, True, True, False, False, False]]
    assert places[here].tolist() == [3, 4, 6]
    assert LONGEST > 2**31


def picks(at: At, count: int) -> Tensor:
    """Random blocks up to each query's own, some of them none, no block twice."""
    torch.manual_seed(1)
    own = at.order // SIZE
    drawn = torch.rand(*own.shape[:-1], GROUPS, own.shape[-1], count + 4).argsort(-1)[..., :count] - 1
    return torch.where(drawn <= own[..., None, :, None], drawn, -1)


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_is_dense(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "CHUNK", chunk)
    at = LAYOUTS[name]
    torch.manual_seed(0)
    q = torch.randn(*at.order.shape, HEADS, HEAD, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*at.order.shape, GROUPS, HEAD, dtype=torch.float64, requires_grad=True) for _ in range(2))
    picked, answers = picks(at, 2), []
    for how in ("reference", "torch"):
        with form.using(how):
            z = attend_picked(q, k, v, picked, SIZE, 0.7, at, at)
        answers.append([z, *torch.autograd.grad(z.sin().sum(), (q, k, v))])
    for got, want in zip(*answers, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max() < 1e-12


def test_gathering_never_looks_at_other_blocks() -> None:
    at, n = At.whole(1, 300), 300
    q, k = torch.randn(1, n, HEADS, HEAD), torch.randn(1, n, GROUPS, HEAD)
    picked = torch.tensor([0, 99]).expand(1, GROUPS, 1, 2)
    last = at.pick(slice(n - 1, n))
    seen = (at.order // SIZE == 0) | (at.order // SIZE == 99)
    poisoned = torch.where(seen[..., None, None], k, torch.nan)
    got = attend_picked(q[:, -1:], poisoned, poisoned, picked, SIZE, 0.7, last, at)
    with form.using("reference"):
        want = attend_picked(q[:, -1:], k, k, picked, SIZE, 0.7, last, at)
    assert (got - want).abs().max() < 1e-5
