"""Mamba and S4 as parts: sharding, errors, and S4 compared with scipy's discretization of the HiPPO system."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import cont2discrete, dlsim

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.placement import cut_of, tp_regions
from dovetail.parts.mixer.s4 import hippo_legs, initial_frequencies
from dovetail.proof.laws.oracle import alone, part
from dovetail.spec.check import advice
from dovetail.spec.fold import declared

MAMBA = "{width: 28, vocab: 62, layers: [{mixer: {kind: mamba, inner: 36, state_size: 5, rank: 3, norm: rmsnorm}, ffn: null}]}"


def test_ranks_shard_channels_and_nothing_else() -> None:
    spec = from_yaml(MAMBA)
    (tp_region,) = (region for region in tp_regions(spec) if region.bounded)
    assert tp_region.shared_out == tp_region.summed == {"inner"}
    cuts = {d.weight.name: cut_of(d, tp_region, 2) for d in declared(spec) if tp_region.holds(d.path)}
    along = {name: None if cut is None else cut.dim for name, cut in cuts.items()}
    assert {name: along[name] for name in ("low.weight", "b.weight", "c.weight", "o.weight")} == dict.fromkeys(
        ("low.weight", "b.weight", "c.weight", "o.weight"), 1
    )
    assert {name: along[name] for name in ("x.weight", "dt.weight", "dt_bias", "a_log", "conv", "skip")} == dict.fromkeys(
        ("x.weight", "dt.weight", "dt_bias", "a_log", "conv", "skip"), 0
    )
    assert along["scale"] is None


@pytest.mark.parametrize(
    ("mixer", "problem"),
    [
        ("{kind: mamba, conv_size: 1}", "layers.0.mixer.conv_size: 1 is not at least 2"),
        ("{kind: mamba, rank: 0}", "layers.0.mixer.rank: 0 is not above 0"),
        ("{kind: mamba2, head: 7, multipliers: [1, 2]}", "layers.0.mixer.multipliers: there are 2, not 5"),
        ("{kind: mamba2, head: 7, multipliers: [1, 1, 0, 1, 1]}", "layers.0.mixer.multipliers.2: 0.0 is not in"),
        ("{kind: mamba2, head: 7, dt_min: 0.5, dt_max: 0.5}", "layers.0.mixer.dt_min: 0.5 is not below dt_max, 0.5"),
        ("{kind: mamba2, head: 7, norm: null, norm_before_gate: true}", "layers.0.mixer.norm_before_gate: there is no norm"),
        ("{kind: mamba2, head: 7, norm: {kind: rmsnorm, groups: 5}}", "layers.0.mixer.norm.groups: 5 does not divide 56"),
        ("{kind: s4, state_size: 0}", "layers.0.mixer.state_size: 0 is not in \\(0, 512\\]"),
    ],
)
def test_errors_come_before_any_tensor(mixer: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        build(from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {mixer}}}]}}"))


@pytest.mark.parametrize("kind", ["mamba", "s4", "lstm"])
def test_short_sequences_get_the_advice_to_use_attention(kind: str) -> None:
    spec = from_yaml(f"{{width: 512, vocab: 62, layers: [{{mixer: {{kind: {kind}}}}}]}}")
    assert [path for path, _ in advice(spec, 100)] == ["layers.0.mixer"]
    assert advice(spec, 512) == []


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("n", [9, 150])  # in chunks, and by FFT
def test_s4_is_the_system_of_scipy(discretization: str, n: int) -> None:
    """The normal part of HiPPO-LegS in its own real coordinates, discretised and simulated by scipy; ours diagonal, complex."""
    size, step = 6, 0.05
    p = np.sqrt(np.arange(size) + 0.5)
    normal = hippo_legs(size).numpy() + p[:, None] * p
    values, vectors = np.linalg.eig(normal)
    upper = np.argsort(values.imag)[size // 2 :]
    assert np.allclose(values[upper].imag, initial_frequencies("legs", size // 2), atol=1e-9)
    assert np.allclose(values.real, -0.5, atol=1e-9)
    rng = np.random.default_rng(0)
    column, row = rng.normal(size=(size, 1)), rng.normal(size=(1, size))
    discrete = cont2discrete((normal, column, row, np.zeros((1, 1))), step, method=discretization)
    u = rng.normal(size=n)
    _, want, _ = dlsim((discrete[0], discrete[1], row, np.zeros((1, 1)), step), np.append(u, 0.0))
    # in eigenvectors' coordinates; B is 1 there, so C carries both
    c = (row @ vectors)[0, upper] * (np.linalg.inv(vectors) @ column)[upper, 0]
    weights = {
        "x.weight": [[1.0]],
        "o.weight": [[1.0]],
        "decay_log": [[float(np.log(0.5))] * 3],
        "turn": [initial_frequencies("legs", 3).tolist()],
        "c": [np.stack([c.real, c.imag], -1).flatten().tolist()],
        "step_log": [float(np.log(step))],
        "skip": [0.0],
    }
    module = alone(part("s4", inner=1, state_size=3, discretization=discretization, act=part("identity")), weights, embed=1)
    got = module(torch.from_numpy(u).view(1, n, 1), Ctx(layout=TokenLayout.whole(1, n)))
    assert np.abs(got.detach().numpy()[0, :, 0] - want[1:, 0]).max() < 1e-10


def test_later_tokens_of_a_short_text_leave_s4_untouched_to_the_last_bit() -> None:
    model = build(from_yaml("{width: 28, vocab: 62, layers: [{mixer: s4, ffn: null}]}"))
    tokens = torch.arange(40)[None]
    other = tokens.clone()
    other[0, 30:] = 0
    with torch.no_grad():
        one, two = (model(t, Ctx(layout=TokenLayout.whole(1, 40))) for t in (tokens, other))
    assert torch.equal(one[:, :30], two[:, :30])
    assert not torch.equal(one[:, 30:], two[:, 30:])
