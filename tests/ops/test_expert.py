"""Matmuls of experts: torch's kernel equals the loop, forward and backward, with empty experts and experts on other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.ops import expert
from dovetail.ops.expert import SortedRows, able, by_token, combine, dispatch, gather, grouped, looped, product
from dovetail.ops.implementation import using

ENDS = {"even": [10, 20, 30, 40], "ragged": [7, 7, 29, 40], "first empty": [0, 13, 13, 40], "one has all": [0, 0, 40, 40]}
TOKENS, K, EXPERTS, INP, OUT = 14, 3, 5, 24, 56


def operands(dtype: torch.dtype, rows: int = 40, experts: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(rows, INP, generator=draw, dtype=torch.float64).to(dtype)
    weights = torch.randn(experts, OUT, INP, generator=draw, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), weights.requires_grad_()


def gradients(y: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weights), g)]


def test_rows_of_other_ranks_alone_have_gradients() -> None:
    x, weights = operands(torch.float64)
    y, *zeros = gradients(looped(x, weights, torch.zeros(4, dtype=torch.int32)), x, weights)
    assert y.shape == (40, OUT)
    assert not any(t.any() for t in (y, *zeros))


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_as_near_to_float64_as_the_loop(dtype: torch.dtype, ends: list[int]) -> None:
    x, weights = operands(dtype)
    where = torch.tensor(ends, dtype=torch.int32)
    assert able(x, weights)
    fast, plain = gradients(grouped(x, weights, where), x, weights), gradients(looped(x, weights, where), x, weights)
    x64, weights64 = (t.detach().double().requires_grad_() for t in (x, weights))
    right = gradients(looped(x64, weights64, where), x64, weights64)
    for mine, theirs, true in zip(fast, plain, right, strict=True):
        scale = true.abs().max()
        ulp = torch.finfo(dtype).eps * scale
        assert (mine.double() - true).abs().max() <= 4 * (theirs.double() - true).abs().max() + 4 * ulp
        assert (mine.double() - true).abs().max() <= 0.02 * scale


def test_the_loop_is_each_expert_by_itself() -> None:
    x, weights = operands(torch.float64)
    y = looped(x, weights, torch.tensor(ENDS["ragged"]))
    for row, number in ((0, 0), (6, 0), (7, 2), (28, 2), (29, 3), (39, 3)):
        assert torch.allclose(y[row], weights[number] @ x[row])


def test_an_expanded_gradient_is_taken() -> None:
    x, weights = operands(torch.float32)
    grouped(x, weights, torch.tensor(ENDS["ragged"], dtype=torch.int32)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], weights[0].sum(0), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "inp", "fits"), [(torch.float32, 28, True), (torch.float32, 26, False), (torch.float64, 28, False)]
)
def test_the_kernel_runs_only_where_it_supports_the_operands(dtype: torch.dtype, inp: int, fits: bool) -> None:
    x, weights = torch.zeros(8, inp, dtype=dtype), torch.zeros(2, 12, inp, dtype=dtype)
    assert able(x, weights) is fits
    assert able(x, weights[:, :11]) is False  # rows of the gradient would not be whole lanes


# -- sorting -----------------------------------------------------------------------------------------------------------


def choices(seed: int = 0) -> Tensor:
    draw = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return draw.topk(K, -1).indices


def reference(x: Tensor, weights: Tensor, chosen: Tensor, shares: Tensor, held: range) -> Tensor:
    """Token by token, choice by choice."""
    out = torch.zeros(TOKENS, OUT, dtype=x.dtype)
    for token in range(TOKENS):
        for place in range(K):
            number = int(chosen[token, place])
            if number in held:
                out[token] += shares[token, place] * (weights[number] @ x[token])
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("held", [range(5), range(2), range(2, 5), range(4, 5)])
def test_every_token_gets_the_sum_of_the_experts_of_this_rank(held: range, dtype: torch.dtype) -> None:
    x, weights = operands(dtype, TOKENS, EXPERTS)
    chosen = choices()
    shares = torch.rand(TOKENS, K, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()
    own = weights[held.start : held.stop]
    rows = dispatch(chosen, torch.tensor(held.start), len(held), len(held) == EXPERTS)
    out = combine(by_token(product(gather(x, rows, K), own, rows), rows, K), shares)
    want = reference(x, weights, chosen, shares, held)
    near = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(out, want, atol=near)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=dtype)
    mine, theirs = (torch.autograd.grad(y, (x, weights, shares), g) for y in (out, want))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, atol=20 * near)  # nothing of what the kernel leaves in memory comes through


def test_rows_have_the_number_of_their_choice() -> None:
    rows = dispatch(torch.tensor([[2, 0], [0, 1], [2, 1]]), torch.tensor(0), 3, True)
    assert rows.choice.tolist() == [1, 2, 3, 5, 0, 4]
    assert rows.expert.tolist() == [0, 0, 1, 1, 2, 2]
    assert rows.ends.tolist() == [2, 4, 6]
    rows = dispatch(torch.tensor([[2, 0], [0, 1], [2, 1]]), torch.tensor(1), 1, False)  # expert 1 alone
    assert rows.ends.tolist() == [2]
    assert rows.choice[:2].tolist() == [3, 5]
    assert rows.local is not None
    assert rows.local.flatten().tolist() == [True, True, False, False, False, False]


def test_the_reference_implementation_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = operands(torch.float32)
    rows = SortedRows(torch.arange(40), torch.zeros(40, dtype=torch.long), torch.tensor(ENDS["even"], dtype=torch.int32), None)
    monkeypatch.setattr(expert, "grouped", lambda *_: pytest.fail("the kernel ran"))
    with using("reference"):
        assert torch.equal(product(x, weights, rows), looped(x, weights, rows.ends))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [range(5), range(2, 4)])
def test_compiled_is_eager_and_whole(dtype: torch.dtype, held: range) -> None:
    x, weights = operands(dtype, TOKENS, EXPERTS)
    shares = torch.ones(TOKENS, K, dtype=dtype)

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = dispatch(chosen, torch.tensor(held.start), len(held), len(held) == EXPERTS)
        y = product(gather(x, rows, K), weights[held.start : held.stop], rows)
        return combine(by_token(y, rows, K), shares)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        chosen = choices(seed)
        for a, b in zip(
            gradients(compiled(x, weights, chosen), x, weights), gradients(run(x, weights, chosen), x, weights), strict=True
        ):
            assert torch.allclose(a, b, atol=1e-6 if dtype != torch.bfloat16 else 0.05, rtol=1e-5)
    torch.compiler.reset()
