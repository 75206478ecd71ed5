"""Law 17, narrow: what it compares, its bounds, and what passes."""

import pytest
import torch

from dovetail.files.spec import load_spec
from dovetail.proof.laws import narrow
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.mutant import spec


@pytest.mark.parametrize(
    "name",
    [
        "vit-tiny",
        *(pytest.param(f"{name}-tiny", marks=pytest.mark.slow) for name in ("llama", "t5", "mixtral", "mamba2", "nsa")),
    ],
)
def test_it_holds_for_presets(name: str):
    case = Case(load_spec(name))
    narrow.narrow(case)
    assert case.compared > 100


@pytest.mark.parametrize("dtype", narrow.NARROW)
def test_the_bound_is_four_times_the_error_of_rounding_and_four_ulp(dtype):
    pair = narrow.NarrowPair(spec(), dtype, 0)
    x = torch.randn(100_000, dtype=torch.float64)
    rounding, ulp = narrow.rms(x.to(dtype).double() - x), 2**-23 * narrow.rms(x)
    assert pair.limit(x, narrow.BOUND) == pytest.approx(4 * rounding + 4 * ulp, rel=0.02)
    assert rounding == pytest.approx(0.23 * torch.finfo(dtype).eps * narrow.rms(x), rel=0.1)
    exact = x.to(dtype).double()  # a step that only moves numbers may not change them
    assert pair.limit(exact, narrow.BOUND) == pytest.approx(4 * ulp, rel=0.1)
    lucky = torch.full((100,), 1.0 + 1e-3 * torch.finfo(dtype).eps, dtype=torch.float64)  # next to a narrow number
    assert pair.limit(lucky, narrow.BOUND) > 4 * 0.2 * torch.finfo(dtype).eps


def test_it_compares_the_tiled_kernel():
    case = Case(spec())
    assert narrow.NarrowPair(case.spec, torch.bfloat16, 0).kernels(case) == ["reference", "tiled"]


def test_a_step_starts_from_the_narrow_value():
    recorded = narrow.Recorded()
    recorded.keep("a", torch.tensor([1.0], dtype=torch.bfloat16))
    assert recorded.compare("a", torch.tensor([1.001], dtype=torch.float64)).item() == 1.0
    assert recorded.complete
    with pytest.raises(IndexError):
        recorded.compare("b", torch.zeros(1))


def test_a_value_beyond_float16_ends_the_comparison():
    case, pair = Case(spec()), narrow.NarrowPair(spec(), torch.float16, 0)
    recorded = narrow.Recorded()
    recorded.keep("large", torch.tensor([1e6]).half())
    recorded.compare("large", torch.tensor([1e6], dtype=torch.float64))
    assert pair.compare(case, recorded, "") is False


def test_routers_are_nearly_tied():
    model = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    weight = narrow.NarrowPair(model, torch.bfloat16, 0).exact.layers[0].ffn.router.out.weight
    assert (weight - weight.mean(0)).std() < weight.mean(0).std() / 8
