"""Decay per key channel: forms agree at every chunk size, and with the formula; nothing overflows or cancels."""

import numpy as np
import pytest
import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops import implementation
from dovetail.ops.scan.gated import gated_scan

ROWS, N, HEADS, KEY, VALUE = 2, 13, 3, 4, 5
PLACES = [TokenLayout.whole(ROWS, N), TokenLayout.packed([(5, 8), (4, 1, 3)], N), TokenLayout.padded([13, 6], N, left=True)]


def some(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.randn(ROWS, N, HEADS, KEY, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(ROWS, N, HEADS, VALUE, dtype=dtype), -3 * torch.rand(ROWS, N, HEADS, KEY, dtype=dtype)


def some_bonus(asked: bool) -> torch.Tensor | None:
    return torch.linspace(-1, 2, HEADS * KEY, dtype=torch.float64).view(HEADS, KEY) if asked else None


@pytest.mark.parametrize("size", [1, 2, 5, 13, 64])
@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_chunks_of_any_size_are_the_recurrence(
    size: int, layout: TokenLayout, asked: bool, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, carry = sequence_rows(layout), torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64)
    monkeypatch.setattr(implementation, "CHUNK", size)
    with torch.set_grad_enabled(trained):
        got, left = gated_scan(*some(), seq, carry, some_bonus(asked))
    with implementation.using("reference"):
        want, kept = gated_scan(*some(), seq, carry, some_bonus(asked))
    assert (got - want).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_the_formula(asked: bool) -> None:
    bonus = some_bonus(asked)
    got, _ = gated_scan(*some(), sequence_rows(TokenLayout.whole(ROWS, N)), None, bonus)
    q, k, v, g = (x.numpy() for x in some())
    want = np.zeros_like(v)
    for row in range(ROWS):
        for head in range(HEADS):
            memory = np.zeros((KEY, VALUE))
            for t in range(N):
                new = np.outer(k[row, t, head], v[row, t, head])
                faded = np.exp(g[row, t, head])[:, None] * memory + new
                seen = faded if bonus is None else memory + bonus[head].numpy()[:, None] * new
                want[row, t, head] = seen.T @ q[row, t, head]
                memory = faded
    assert np.abs(got.numpy() - want).max() < 1e-12


@pytest.mark.parametrize("sizes", [[13], [1] * 13, [2, 1, 7, 3]])
@pytest.mark.parametrize("asked", [False, True])
def test_it_continues_across_calls(sizes: list[int], asked: bool) -> None:
    want, kept = gated_scan(*some(), sequence_rows(TokenLayout.whole(ROWS, N)), None, some_bonus(asked))
    carry, place, got = None, 0, []
    for size in sizes:
        piece = [x[:, place : place + size] for x in some()]
        y, carry = gated_scan(*piece, sequence_rows(TokenLayout.whole(ROWS, size, start=place)), carry, some_bonus(asked))
        got.append(y)
        place += size
    assert (torch.cat(got, 1) - want).abs().max() < 1e-12
    assert carry is not None
    assert (carry - kept).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_inputs_are_left_as_they_were(n: int) -> None:
    torch.manual_seed(0)
    given = [torch.rand(1, n, 1, 4) for _ in range(3)] + [-torch.rand(1, n, 1, 4)]
    kept = [x.clone() for x in given]
    gated_scan(*given, sequence_rows(TokenLayout.whole(1, n)), None)
    gated_scan(*given, sequence_rows(TokenLayout.whole(1, n)), None, torch.ones(1, 4))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_a_state_that_decays_at_once_does_not_overflow() -> None:
    q, k, v, _ = some(torch.float32)
    g = torch.full((ROWS, N, HEADS, KEY), -500.0).requires_grad_()
    y, left = gated_scan(q, k, v, g, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    alone = (q * k).sum(-1, keepdim=True) * v  # nothing but the token itself is left
    assert (y - alone).abs().max() < 1e-5
    (grad,) = torch.autograd.grad(y.sum() + left.sum(), g)
    assert grad.isfinite().all()


def test_outputs_after_a_sudden_decay_are_exact() -> None:
    """Running sums of g would be near −8,000 here, and their differences off by a thousandth."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 8) for _ in range(3))
    g = -0.01 * torch.rand(1, 64, 1, 8)
    g[:, 10] = -8000.0
    got, _ = gated_scan(q, k, v, g, sequence_rows(TokenLayout.whole(1, 64)), None)
    with implementation.using("reference"):
        want, _ = gated_scan(q.double(), k.double(), v.double(), g.double(), sequence_rows(TokenLayout.whole(1, 64)), None)
    assert (got - want).abs().max() < 2e-6 * want.abs().max()


def test_the_state_is_float32_or_wider() -> None:
    q, k, v, g = (x.bfloat16() for x in some(torch.float32))
    y, left = gated_scan(q, k, v, g, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    assert y.dtype == torch.bfloat16
    assert left.dtype == torch.float32


def test_no_gradient_is_lost_in_chunks() -> None:
    inputs = [x.requires_grad_() for x in (*some(), torch.ones(HEADS, KEY, dtype=torch.float64))]
    *qkvg, bonus = inputs
    seq = sequence_rows(PLACES[1])
    got = torch.autograd.grad(gated_scan(*qkvg, seq, None, bonus)[0].sin().sum(), inputs)
    with implementation.using("reference"):
        want = torch.autograd.grad(gated_scan(*qkvg, seq, None, bonus)[0].sin().sum(), inputs)
    assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) < 1e-11
