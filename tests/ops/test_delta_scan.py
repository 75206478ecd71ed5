"""The gated delta rule: forms agree at every chunk size, and with transformers; nothing overflows or cancels."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as peer

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops import implementation
from dovetail.ops.scan.delta import delta_scan

ROWS, N, HEADS, KEY, VALUE = 2, 13, 3, 4, 5


def some(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(ROWS, n, HEADS, KEY, dtype=dtype), dim=-1) for _ in range(2))
    v, g = torch.randn(ROWS, n, HEADS, VALUE, dtype=dtype), -2 * torch.rand(ROWS, n, HEADS, dtype=dtype)
    return q, k, v, g, torch.rand(ROWS, n, HEADS, dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 5, 13, 64])
@pytest.mark.parametrize(
    "layout",
    [TokenLayout.whole(ROWS, N), TokenLayout.packed([(5, 8), (4, 1, 3)], N), TokenLayout.padded([13, 6], N, left=True)],
)
def test_chunks_of_any_size_are_the_recurrence(size: int, layout: TokenLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, carry = sequence_rows(layout), torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64)
    monkeypatch.setattr(implementation, "CHUNK", size)
    got, left = delta_scan(*some(), seq, carry)
    with implementation.using("reference"):
        want, kept = delta_scan(*some(), seq, carry)
    assert (got - want).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


@pytest.mark.parametrize("theirs", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("n", [13, 150])
def test_it_is_what_transformers_computes(theirs: str, n: int) -> None:
    q, k, v, g, beta = some(torch.float32, n)
    carry = torch.randn(ROWS, HEADS, KEY, VALUE)
    want, kept = getattr(peer, theirs)(q, k, v, g, beta, initial_state=carry, output_final_state=True)
    got, left = delta_scan(q * KEY**-0.5, k, v, g, beta, sequence_rows(TokenLayout.whole(ROWS, n, start=1)), carry)
    assert (got - want).abs().max() < 1e-5
    assert (left - kept).abs().max() < 1e-5


@pytest.mark.parametrize("sizes", [[13], [1] * 13, [2, 1, 7, 3]])
def test_it_continues_across_calls(sizes: list[int]) -> None:
    want, kept = delta_scan(*some(), sequence_rows(TokenLayout.whole(ROWS, N)), None)
    carry, place, got = None, 0, []
    for size in sizes:
        piece = [x[:, place : place + size] for x in some()]
        y, carry = delta_scan(*piece, sequence_rows(TokenLayout.whole(ROWS, size, start=place)), carry)
        got.append(y)
        place += size
    assert (torch.cat(got, 1) - want).abs().max() < 1e-12
    assert carry is not None
    assert (carry - kept).abs().max() < 1e-12


def test_a_key_written_twice_recalls_the_last_value() -> None:
    k = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2).double()
    v = torch.tensor([4.0, -7.0, 5.0], dtype=torch.float64).view(1, 3, 1, 1)
    one = torch.ones(1, 3, 1, dtype=torch.float64)
    y, left = delta_scan(k, k, v, 0 * one, one, sequence_rows(TokenLayout.whole(1, 3)), None)
    assert y.flatten().tolist() == [4.0, -7.0, 5.0]
    assert left.flatten().tolist() == [5.0, 0.0]


def test_a_state_that_decays_at_once_does_not_overflow() -> None:
    q, k, v, _, beta = some(torch.float32)
    g = torch.full((ROWS, N, HEADS), -500.0).requires_grad_()
    y, left = delta_scan(q, k, v, g, beta, sequence_rows(TokenLayout.whole(ROWS, N)), None)
    alone = (q * k).sum(-1, keepdim=True) * v * beta[..., None]
    assert (y - alone).abs().max() < 1e-5
    (grad,) = torch.autograd.grad(y.sum() + left.sum(), g)
    assert grad.isfinite().all()


def test_outputs_after_a_sudden_decay_are_exact() -> None:
    """Running sums of g would be near −8,000 here, and their differences off by a thousandth."""
    q, k, v, g, beta = some(torch.float32, 64)
    g = 0.005 * g
    g[:, 10] = -8000.0
    got, _ = delta_scan(q, k, v, g, beta, sequence_rows(TokenLayout.whole(ROWS, 64)), None)
    with implementation.using("reference"):
        want, _ = delta_scan(*(x.double() for x in (q, k, v, g, beta)), sequence_rows(TokenLayout.whole(ROWS, 64)), None)
    assert (got - want).abs().max() < 2e-6 * want.abs().max()


def test_the_state_is_float32_or_wider() -> None:
    y, left = delta_scan(*(x.bfloat16() for x in some(torch.float32)), sequence_rows(TokenLayout.whole(ROWS, N)), None)
    assert y.dtype == torch.bfloat16
    assert left.dtype == torch.float32
