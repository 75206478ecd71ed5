"""RNN, LSTM and GRU as mixers: equal to torch.nn's for the same weights, forward and backward; heads are independent cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.placement import cut_of, tp_regions
from dovetail.parts.mixer.cells import Gru, Lstm, Rnn
from dovetail.proof.laws.oracle import alone
from dovetail.spec.check import check
from dovetail.spec.fold import declared

WIDTH, INNER, ROWS, N = 7, 5, 3, 12
KINDS: dict[str, tuple[Any, Any]] = {"rnn": (Rnn, nn.RNN), "lstm": (Lstm, nn.LSTM), "gru": (Gru, nn.GRU)}


class Same(nn.Module):
    """Stands in for a linear leaf: the identity."""

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return x


def theirs(kind: str, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    made = KINDS[kind][1](WIDTH, INNER, batch_first=True, bias=bias).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape))
    return made


def ours(kind: str, cell: Any, bias: bool) -> Any:
    """The same weights: of torch's two biases we hold the sum, but for the one that a GRU's reset gate scales."""
    weights = {"x.weight": cell.weight_ih_l0, "u": cell.weight_hh_l0[None], "o.weight": torch.zeros(WIDTH, INNER)}
    if bias:
        first, second = cell.bias_ih_l0.clone(), cell.bias_hh_l0.clone()
        if kind == "gru":
            weights["held_bias"] = second[2 * INNER :].clone()
            second[2 * INNER :] = 0
        weights["x.bias"] = first + second
    module = alone(KINDS[kind][0](inner=INNER, bias=bias), {k: v.tolist() for k, v in weights.items()}, embed=WIDTH)
    module.o = Same()  # the cell itself
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_that_of_torch(kind: str, bias: bool) -> None:
    cell = theirs(kind, bias)
    module = ours(kind, cell, bias)
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64)
    mine, their = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = module(mine, Ctx(layout=TokenLayout.whole(ROWS, N))), cell(their)[0]
    assert (got - want).abs().max() < 1e-13
    weight = torch.randn_like(want)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    assert (mine.grad - their.grad).abs().max() < 1e-12  # type: ignore[operator]
    grad: Tensor = module.u.grad[0]
    assert (grad - cell.weight_hh_l0.grad).abs().max() < 1e-11  # type: ignore[operator]


def test_heads_are_cells_side_by_side() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64)
    cells = [theirs("gru", True) for _ in range(2)]
    with torch.no_grad():
        for p in cells[1].parameters():
            p.mul_(-0.5)
    apart = [ours("gru", cell, True)(x, Ctx(layout=TokenLayout.whole(ROWS, N))) for cell in cells]
    both = [ours("gru", cell, True) for cell in cells]
    joined = {
        "x.weight": torch.cat([m.x.weight for m in both]),
        "x.bias": torch.cat([m.x.bias for m in both]),
        "u": torch.cat([m.u for m in both]),
        "held_bias": torch.cat([m.held_bias for m in both]),
        "o.weight": torch.zeros(WIDTH, 2 * INNER),
    }
    module = alone(Gru(inner=2 * INNER, heads=2), {k: v.tolist() for k, v in joined.items()}, embed=WIDTH)
    module.o = Same()
    assert (module(x, Ctx(layout=TokenLayout.whole(ROWS, N))) - torch.cat(apart, -1)).abs().max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_one_head_cannot_be_sharded(kind: str) -> None:
    for heads, cuts in ((1, False), (2, True)):
        spec = from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{kind: {kind}, heads: {heads}}}}}]}}")
        check(spec)
        (tp_region, *_) = (region for region in tp_regions(spec) if region.bounded)
        inside = [d for d in declared(spec) if tp_region.holds(d.path)]
        if cuts:
            assert all(cut_of(d, tp_region, 2) is not None for d in inside)
        else:
            with pytest.raises(SpecError, match="heads = 1 cannot be cut over 2 tensor-parallel ranks"):
                [cut_of(d, tp_region, 2) for d in inside]


def test_a_state_size_that_heads_do_not_divide_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"layers.0.mixer.heads: 3 does not divide the state of size 28"):
        build(from_yaml("{width: 28, vocab: 62, layers: [{mixer: {kind: lstm, heads: 3}}]}"))
