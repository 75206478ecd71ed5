"""GPTQ and AWQ: against independent forms of the same algorithm, and what they do to a model."""

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.ops.formats.format import CODES
from dovetail.ops.formats.kinds import NF4, Int4, Int8
from dovetail.proof.laws.case import perturbed
from dovetail.weights.quantization.awq import loss, search
from dovetail.weights.quantization.calibrate import layers_of, observed, run
from dovetail.weights.quantization.gptq import gptq
from dovetail.weights.quantization.method import apply
from dovetail.weights.quantization.recipe import leaf_at, quantized_leaves, select

SPEC = """
width: 32
vocab: 62
layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 8}, ffn: {hidden: 48}}]
"""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(inp: int, seed: int = 1) -> torch.Tensor:
    x = drawn(4 * inp, inp, seed=seed) @ drawn(inp, inp, seed=seed + 1)
    return x.T @ x / len(x)


def tokens(rows: int = 4, n: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 62, (rows, n), generator=torch.Generator().manual_seed(seed))


def by_inverses(w, hessian, format, damping):
    """Optimal brain quantization, one input after the other, with an inverse of the inputs that are left each time."""
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    grid = format.grid(format.fit(format.grouped(w)))
    w, inp = w.double().clone(), w.shape[-1]
    out = torch.empty_like(w)
    for j in range(inp):
        inverse = torch.linalg.inv(h[j:, j:])
        own = type(grid)(
            grid.scale[:, j // format.size(inp)], None if grid.zero is None else grid.zero[:, j // format.size(inp)]
        )
        out[:, j] = format.value(format.nearest(w[:, j], own), own).double()
        w[:, j:] -= ((w[:, j] - out[:, j]) / inverse[0, 0])[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("format", [Int4(group=8), Int4(group=8, zero_point=True), NF4(group=8), Int8()], ids=str)
def test_gptq_is_optimal_brain_quantization(format):
    w, hessian = drawn(6, 24), correlated(24)
    got = format.decode(gptq(w, hessian, format, damping=0.01, order=False), 24)
    want = by_inverses(w, hessian, format, 0.01)
    assert (got.double() - want).abs().max() < 1e-6


def test_gptq_on_uncorrelated_inputs_is_rounding_to_nearest():
    w, format = drawn(2, 5, 24), Int4(group=8)
    hessian = torch.diag(drawn(24).abs() + 0.1).expand(2, 24, 24)
    assert torch.equal(gptq(w, hessian, format)[CODES], format.encode(w)[CODES])


def test_gptq_makes_a_smaller_error_than_rounding():
    w, hessian, format = drawn(16, 160), correlated(160), Int4(group=32)
    by_rounding = loss(w, format.decode(format.encode(w), 160), hessian)
    for order in (False, True):
        assert loss(w, format.decode(gptq(w, hessian, format, order=order), 160), hessian) < 0.6 * by_rounding


def test_gptq_takes_inputs_that_are_always_zero():
    hessian = correlated(16)
    hessian[3], hessian[:, 3] = 0, 0
    assert Int4(group=8).decode(gptq(drawn(4, 16), hessian, Int4(group=8)), 16).isfinite().all()


def test_awq_finds_the_channel_that_matters():
    w, hessian = drawn(16, 64), torch.eye(64)
    hessian[5, 5] = 400.0
    scale = search([w], hessian, [Int4(group=64)])
    assert scale.argmax() == 5
    assert scale[5] > 1.5 * scale.median()


def test_the_hessian_is_the_mean_of_the_outer_products_of_inputs():
    model = perturbed(dt.from_yaml(SPEC), 0, torch.float32)
    batches, found = [tokens(seed=0), tokens(3, 20, seed=1)], []
    with observed(model, ["layers.1.mixer.q", "layers.1.mixer.k", "layers.1.ffn.down"]) as seen:
        for batch in batches:
            run(model, batch, "layers.1")
    assert seen.inputs["layers.1.mixer.q"] is seen.inputs["layers.1.mixer.k"]
    leaf = leaf_at(model, "layers.1.ffn.down")
    leaf.register_forward_pre_hook(lambda module, args: found.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    x = torch.cat(found)
    assert (seen.inputs["layers.1.ffn.down"].hessian - x.T @ x / len(x)).abs().max() < 1e-4
    assert seen.inputs["layers.1.ffn.down"].tokens == len(x) == 220


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_method_that_reads_text_changes_less_than_rounding(method):
    spec, gaps, steps = dt.from_yaml(SPEC), {}, []
    with torch.no_grad():
        want = perturbed(spec, 0, torch.float32)(tokens(8, seed=9))
        for name in ("rtn", method):
            model = perturbed(spec, 0, torch.float32)
            applied = apply(
                model, select(spec, Int4(group=16)), name, [tokens(16, seed=i) for i in range(3)], lambda *n: steps.append(n)
            )
            assert applied.leaves == len(list(quantized_leaves(model))) == 14
            gaps[name] = float((model(tokens(8, seed=9)) - want).square().mean())
    assert steps[-1] == (6, 6)
    assert gaps[method] < {"gptq": 0.9, "awq": 1.0}[method] * gaps["rtn"]


def test_awq_folds_where_it_is_exact_and_nowhere_else():
    spec = dt.from_yaml(SPEC)
    model = perturbed(spec, 0, torch.float32)
    applied = apply(model, select(spec, Int4(group=16)), "awq", [tokens()])
    assert applied.folded == 2 * (3 + 2 + 1)  # q, k, v and gate, up by their norm, down by up; o has fewer KV heads before it
    routed = spec.set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 16})  # a router reads what the experts read
    model = perturbed(routed, 0, torch.float32)
    before = [module.scale.clone() for name, module in model.named_modules() if name.endswith("ffn_norm")]
    apply(model, select(routed, Int4(group=16)), "awq", [tokens()])
    after = [module.scale for name, module in model.named_modules() if name.endswith("ffn_norm")]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("norm", [{"kind": "rmsnorm", "plus_one": True}, {"kind": "layernorm"}])
def test_awq_folds_into_a_norm_of_another_form(norm):
    spec = dt.from_yaml(SPEC).set("layers.*.norm", norm)
    model = perturbed(spec, 0, torch.float32)
    assert apply(model, select(spec, Int4(group=16)), "awq", [tokens()]).folded == 12


def test_experts_are_calibrated_one_by_one():
    spec = dt.from_yaml(SPEC).set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 16})
    model = perturbed(spec, 0, torch.float32)
    with observed(model, ["layers.0.ffn.bank.up"]) as seen:
        run(model, tokens(), "layers.0")
    found = seen.inputs["layers.0.ffn.bank.up"]
    assert found.hessian.shape == (4, 32, 32)
    assert found.tokens.sum() == 160 * spec.layers[0].ffn.router.choices()
    apply(model, select(spec, Int4(group=16)), "gptq", [tokens()])
    assert model(tokens()).isfinite().all()


def test_layers_are_those_of_the_paths():
    paths = ["layers.0.mixer.q", "layers.0.ffn.up", "layers.11.mixer.q", "encoder.layers.2.mixer.q"]
    assert list(layers_of(dt.from_yaml(SPEC), paths)) == ["layers.0", "layers.11", "encoder.layers.2"]


def test_refusals():
    spec = dt.from_yaml(SPEC)
    model = perturbed(spec, 0, torch.float32)
    with pytest.raises(UsageError, match=r"no such method; did you mean gptq"):
        apply(model, select(spec, Int8()), "gptqq", [tokens()])
    with pytest.raises(UsageError, match="needs calibration text"):
        apply(model, select(spec, Int8()), "gptq")
    pair = perturbed(dt.load_spec("t5-tiny"), 0, torch.float32)
    with pytest.raises(SpecError, match="use the method rtn"):
        apply(pair, select(pair.spec, Int8()), "gptq", [tokens()])
