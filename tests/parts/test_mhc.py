"""Hyper-connections against transformers' module of DeepSeek-V4, and their place between other wires."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import dovetail as dt
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parts.mhc import MhcModule
from dovetail.spec.part import walk

SPEC = """
width: 28
vocab: 62
layers:
- repeat: 2
  wire: {kind: mhc, count: 3, iterations: 7, eps: 0.002, norm_eps: 0.03}
  mixer: {heads: 2}
  ffn: {hidden: 44}
"""


def perturbed() -> MhcModule:
    """The wire of the last block, with random weights."""
    torch.manual_seed(0)
    wire = build(dt.from_yaml(SPEC), dtype=torch.float64).layers[1].wire
    with torch.no_grad():
        for weight in wire.parameters():
            weight.copy_(torch.randn_like(weight))
    assert isinstance(wire, MhcModule)
    return wire


def test_reads_writes_and_mixes_as_the_reference_does() -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    config = SimpleNamespace(hc_mult=3, hc_sinkhorn_iters=7, hc_eps=0.002, rms_norm_eps=0.03, hidden_size=28)
    wire, x = perturbed(), torch.randn(2, 5, 3, 28, dtype=torch.float64)
    for branch in (0, 1):
        theirs = DeepseekV4HyperConnection(config)
        theirs.fn.data = wire.modules_named(f"mix{branch}").weight.data.clone()
        theirs.base.data, theirs.scale.data = wire.base[branch].data.clone(), wire.factor[branch].data.clone()
        post, comb, read = theirs(x)
        pre, own_post, own_comb = wire.coefficients(x, branch, Ctx(layout=TokenLayout.whole(2, 5)))
        for got, want in ((own_post, post), (own_comb, comb), (wire.mixture(pre, x), read)):
            torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)  # theirs computes in float32
    head = DeepseekV4HyperHead(config)
    head.hc_fn.data, head.hc_base.data = wire.end.weight.data.clone(), wire.end_base.data.clone()
    head.hc_scale.data = wire.end_factor.data.clone()
    torch.testing.assert_close(wire.close(x), head(x).double(), rtol=1e-5, atol=1e-5)


def test_the_mixture_has_rows_and_columns_that_sum_to_one() -> None:
    mixing = MhcModule.sinkhorn(SimpleNamespace(eps=1e-12, iterations=60), torch.rand(4, 5, 5, dtype=torch.float64))  # type: ignore[arg-type]
    for axis in (-1, -2):
        torch.testing.assert_close(mixing.sum(axis), torch.ones(4, 5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_it_begins_as_pre_norm() -> None:
    ids = torch.randint(0, 62, (2, 9), generator=torch.Generator().manual_seed(0))
    spec = dt.from_yaml(SPEC).swap("wire", {"kind": "mhc", "count": 4, "iterations": 20})
    wide = build(spec, dtype=torch.float64)
    plain = build(spec.swap("wire", "pre_norm"), dtype=torch.float64)
    plain.load_state_dict({name: value for name, value in wide.state_dict().items() if ".wire." not in name})
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if ".wire." in name and "factor" in name:
                weight.zero_()  # what depends on the token is 0.01 of it initially
        difference = (wide(ids) - plain(ids)).abs().max() / plain(ids).abs().max()
    assert difference < 1e-2


def test_a_run_of_streams_opens_and_closes_where_others_begin() -> None:
    spec = dt.from_yaml(SPEC)
    wide, other = spec.layers[0], spec.swap("wire", "pre_norm").layers[0]
    three = spec.swap("wire", {"kind": "mhc", "count": 5}).layers[0]
    layers = (other, wide, wide, three, other, wide)
    mixed = spec.rewrite("layers", lambda place: layers)
    scopes = [scope for path, _, scope in walk(mixed) if path.count(".") == 1 and path.startswith("layers.")]
    assert [scope.opens for scope in scopes] == [False, True, False, True, False, True]
    assert [scope.closes for scope in scopes] == [False, False, True, True, False, True]
    model = dt.build(mixed)
    seen = model.trace(torch.zeros(1, 4, dtype=torch.long), "layers.*.in")
    assert [seen[f"layers.{i}.in"].dim() for i in range(6)] == [3, 3, 4, 3, 3, 3]
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 62)
