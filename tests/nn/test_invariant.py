"""Invariant leaves: the facts of torch they rely on, and that they are the plain leaves up to rounding."""

import pytest
import torch
import torch.nn.functional as F

from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.fused import TILE, make_invariant
from dovetail.nn.linear import Linear

SIZES = [(28, 44), (512, 1408), (1408, 512)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inp", "out"), SIZES)
def test_in_a_tile_of_sixteen_rows_each_row_has_the_same_bits_wherever_it_is(dtype, inp, out):
    torch.manual_seed(0)
    weight, x = torch.randn(out, inp).to(dtype), torch.randn(TILE, inp).to(dtype)
    want = F.linear(x, weight)
    for _ in range(3):
        order = torch.randperm(TILE)
        assert torch.equal(F.linear(x[order], weight), want[order])
    others = torch.randn(TILE, inp).to(dtype)
    others[9] = x[2]
    assert torch.equal(F.linear(others, weight)[9], want[2])


def test_in_float32_the_number_of_rows_changes_the_bits_of_a_plain_product():
    torch.manual_seed(0)
    weight, x = torch.randn(1408, 512), torch.randn(3, 512)
    assert not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1]), "invariant leaves would not be needed"


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_an_invariant_leaf_is_the_plain_one_up_to_rounding(rows):
    plain = Linear((11, 7), bias=True).to_empty(device="cpu").double()
    torch.nn.init.normal_(plain.weight)
    torch.nn.init.normal_(plain.bias)
    x = torch.randn(rows, 7, dtype=torch.float64)
    want = plain(x)
    assert make_invariant(plain) == 1
    torch.testing.assert_close(plain(x), want)


def test_a_model_keeps_its_names_weights_and_ties():
    spec = load_spec("mixtral-tiny").set("head.tied", True)
    model, other = build(spec), build(spec)
    assert make_invariant(model) > 0
    assert list(model.state_dict()) == list(other.state_dict())
    assert model.head.out.weight is model.embed.table  # type: ignore[attr-defined]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), other(ids), rtol=1e-4, atol=1e-5)


def test_experts_with_biases():
    spec = from_yaml("""
        width: 28
        vocab: 62
        layers: [{mixer: {heads: 2}, ffn: {kind: moe, experts: 3, hidden: 20, bias: true}}]
    """)
    model, other = build(spec, dtype=torch.float64), build(spec, dtype=torch.float64)
    with torch.no_grad():
        for one in (model, other):
            for name, weight in one.named_parameters():
                if name.endswith("bias"):
                    weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        make_invariant(model)
        torch.testing.assert_close(model(torch.arange(9)[None]), other(torch.arange(9)[None]))
