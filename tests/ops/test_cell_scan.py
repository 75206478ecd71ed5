"""Recurrent cells step by step: padding changes nothing, a document starts from zeros, a call continues the previous one."""

import pytest
import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops.scan.cell import Step, gru_step, lstm_step, rnn_step, unroll

ROWS, N, HEADS, HEAD = 2, 11, 2, 3
CELLS = {"rnn": (rnn_step, 1, 1), "lstm": (lstm_step, 4, 2), "gru": (gru_step, 3, 1)}


def some(gates: int, memories: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, N, HEADS, gates * HEAD, dtype=torch.float64)
    u = torch.randn(HEADS, gates * HEAD, HEAD, dtype=torch.float64)
    return x, u, tuple(torch.randn(ROWS, HEADS, HEAD, dtype=torch.float64) for _ in range(memories))


@pytest.mark.parametrize(("step", "gates", "memories"), CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("sizes", [[1] * 11, [5, 6], [2, 1, 8]])
def test_a_cell_continues_across_calls(step: Step, gates: int, memories: int, sizes: list[int]) -> None:
    x, u, carry = some(gates, memories)
    want, kept = unroll(step, x, u, None, sequence_rows(TokenLayout.whole(ROWS, N, start=2)), carry)
    got, place = [], 0
    for size in sizes:
        seq = sequence_rows(TokenLayout.whole(ROWS, size, start=2 + place))
        h, carry = unroll(step, x[:, place : place + size], u, None, seq, carry)
        got.append(h)
        place += size
    assert torch.equal(torch.cat(got, 1), want)
    assert all(torch.equal(a, b) for a, b in zip(carry, kept, strict=True))


@pytest.mark.parametrize(("step", "gates", "memories"), CELLS.values(), ids=CELLS)
def test_padding_changes_nothing_and_documents_start_from_zeros(step: Step, gates: int, memories: int) -> None:
    x, u, carry = some(gates, memories)
    nothing = tuple(torch.zeros_like(m[:1]) for m in carry)
    h, left = unroll(step, x, u, None, sequence_rows(TokenLayout.packed([(4, 5), (11,)], N)), carry)
    first, _ = unroll(step, x[:1, :4], u, None, sequence_rows(TokenLayout.whole(1, 4)), nothing)
    second, last = unroll(step, x[:1, 4:9], u, None, sequence_rows(TokenLayout.whole(1, 5)), nothing)
    assert torch.allclose(h[0, :4], first[0], atol=1e-14)
    assert torch.allclose(h[0, 4:9], second[0], atol=1e-14)
    assert all(torch.allclose(a[:1], b, atol=1e-14) for a, b in zip(left, last, strict=True))


def test_the_state_is_float32_or_wider() -> None:
    x, u, carry = some(4, 2)
    h, left = unroll(lstm_step, x.bfloat16(), u.bfloat16(), None, sequence_rows(TokenLayout.whole(ROWS, N)), carry)
    assert h.dtype == torch.bfloat16
    assert {m.dtype for m in left} == {torch.float32}
