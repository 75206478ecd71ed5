"""The selective scan: runs of any length are the recurrence, forward and backward; nothing overflows; work is linear in n."""

import pytest
import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops import implementation
from dovetail.ops.scan import selective
from dovetail.ops.scan.selective import selective_scan

ROWS, N, CHANNELS, STATE = 2, 37, 3, 4
PLACES = [
    TokenLayout.whole(ROWS, N),
    TokenLayout.packed([(5, 8, 20), (4, 1, 3, 29)], N),
    TokenLayout.padded([37, 6], N, left=True),
    TokenLayout.padded([37, 6], N),
]


def some(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, dt = torch.randn(ROWS, n, CHANNELS, dtype=dtype), torch.rand(ROWS, n, CHANNELS, dtype=dtype)
    a = -torch.rand(CHANNELS, STATE, dtype=dtype)
    return x, dt, a, torch.randn(ROWS, n, STATE, dtype=dtype), torch.randn(ROWS, n, STATE, dtype=dtype)


@pytest.mark.parametrize("slab", [1, 100, 65536])  # no runs side by side, a few, as many as there are
@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("layout", PLACES)
def test_runs_of_any_length_are_the_recurrence(
    slab: int, size: int, layout: TokenLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, carry = sequence_rows(layout), torch.randn(ROWS, CHANNELS, STATE, dtype=torch.float64)
    monkeypatch.setattr(implementation, "CHUNK", size)
    monkeypatch.setattr(selective, "SLAB", slab)
    got, left = selective_scan(*some(), seq, carry)
    with implementation.using("reference"):
        want, kept = selective_scan(*some(), seq, carry)
    assert (got - want).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


def test_gradients_of_runs_are_those_of_the_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CHUNK", 3)  # pieces of 9: each computed again in backward
    seq = sequence_rows(PLACES[1])

    def gradients() -> list[torch.Tensor]:
        given = [x.requires_grad_() for x in some()]
        carry = torch.ones(ROWS, CHANNELS, STATE, dtype=torch.float64, requires_grad=True)
        y, left = selective_scan(*given, seq, carry)
        return list(torch.autograd.grad(y.sin().sum() + left.sin().sum(), [*given, carry]))

    got = gradients()
    with implementation.using("reference"):
        want = gradients()
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_a_state_that_decays_at_once_does_not_overflow() -> None:
    x, dt, a, b, c = some(torch.float32)
    y, left = selective_scan(x, dt + 1, a * 1e4 - 1e4, b, c, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    alone = (b * c).sum(-1, keepdim=True) * x * (dt + 1)  # nothing but the token itself is left
    assert (y - alone).abs().max() < 1e-4
    assert left.isfinite().all()


def test_the_state_is_float32_or_wider() -> None:
    y, left = selective_scan(*(x.bfloat16() for x in some(torch.float32)), sequence_rows(TokenLayout.whole(ROWS, N)), None)
    assert (y.dtype, left.dtype) == (torch.bfloat16, torch.float32)


def test_peak_memory_does_not_grow_with_n(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "SLAB", 200)  # eight runs of 64 tokens
    longest: list[int] = []
    plain = selective.in_runs

    def watched(x: torch.Tensor, *rest: object) -> object:
        longest.append(x.shape[1])
        return plain(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(selective, "in_runs", watched)
    for n in (1000, 3000):
        selective_scan(*some(n=n), sequence_rows(TokenLayout.whole(ROWS, n)), None)
        assert max(longest) == 64 * (200 // (ROWS * CHANNELS * STATE))
    assert len(longest) == -(-1000 // 512) + -(-3000 // 512)
