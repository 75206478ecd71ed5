"""Decay per head: all forms agree at every chunk size, across documents, padding and calls, without overflow."""

import pytest
import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops import implementation
from dovetail.ops.scan.conv import causal_conv
from dovetail.ops.scan.decay import decay_scan

ROWS, N, HEADS, KEY, VALUE = 2, 13, 3, 4, 5


def some(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.randn(ROWS, N, HEADS, KEY, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(ROWS, N, HEADS, VALUE, dtype=dtype), -torch.rand(ROWS, N, HEADS, dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 5, 13, 64])
@pytest.mark.parametrize(
    "layout",
    [TokenLayout.whole(ROWS, N), TokenLayout.packed([(5, 8), (4, 1, 3)], N), TokenLayout.padded([13, 6], N, left=True)],
)
def test_chunks_of_any_size_are_the_recurrence(size: int, layout: TokenLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, carry = sequence_rows(layout), torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64)
    monkeypatch.setattr(implementation, "CHUNK", size)
    got, left = decay_scan(*some(), seq, carry)
    with implementation.using("reference"):
        want, kept = decay_scan(*some(), seq, carry)
    assert (got - want).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


def test_a_state_that_decays_at_once_does_not_overflow() -> None:
    q, k, v, _ = some(torch.float32)
    g = torch.full((ROWS, N, HEADS), -500.0)
    y, left = decay_scan(q, k, v, g, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    alone = (q * k).sum(-1, keepdim=True) * v  # nothing but the token itself is left
    assert y.isfinite().all()
    assert (y - alone).abs().max() < 1e-5
    assert left.isfinite().all()


def test_the_state_is_float32_or_wider() -> None:
    q, k, v, g = (x.bfloat16() for x in some(torch.float32))
    y, left = decay_scan(q, k, v, g, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    assert y.dtype == torch.bfloat16
    assert left.dtype == torch.float32


@pytest.mark.parametrize("sizes", [[13], [1] * 13, [2, 1, 7, 3]])
def test_a_convolution_continues_across_calls(sizes: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, N, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    want = torch.nn.functional.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), weight[:, None], groups=3).mT
    tail, place, got = None, 0, []
    for size in sizes:
        y, tail = causal_conv(
            x[:, place : place + size], weight, None, sequence_rows(TokenLayout.whole(ROWS, size, start=place)), tail
        )
        got.append(y)
        place += size
    assert (torch.cat(got, 1) - want).abs().max() < 1e-12
