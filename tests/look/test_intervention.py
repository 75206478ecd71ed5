from __future__ import annotations

import pytest
import torch
from tiny import IDS, MIXED, MODEL, OTHER

import dovetail as dt
from dovetail.base.errors import InputError
from dovetail.look.gradient import integrated_gradients
from dovetail.look.intervention import Replacement, freeze, from_run, mean_of, noise, project_out, resample, steer
from dovetail.look.tracer import Tracer, trace

X = "layers.1.in"


def patched(patch: dict[str, Replacement], address: str = X) -> torch.Tensor:
    return trace(MODEL, IDS, address, patch=patch)[address]


@pytest.fixture(scope="module")
def other() -> dt.look.Trace:
    return trace(MODEL, OTHER, "*")


def test_each_intervention_replaces_its_slice_and_nothing_else(other: dt.look.Trace) -> None:
    plain, v = trace(MODEL, IDS, X)[X], torch.randn(28, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    unit = v / v.norm()
    wanted = {
        "zero": (0.0, torch.zeros_like(plain)),
        "value": (plain[:, 3].clone(), plain[:, 3:4].expand_as(plain)),
        "function": (lambda x: 2 * x, 2 * plain),
        "run": (from_run(other), other[X]),
        "resample": (resample(other), other[X].flip(0)),
        "mean": (mean_of(other), other[X].mean((0, 1)).expand_as(plain)),
        "steer": (steer(v, 3.0), plain + 3 * unit),
        "project": (project_out(v), plain - (plain @ unit)[..., None] * unit),
    }
    for name, (replacement, want) in wanted.items():
        got = patched({f"{X}[pos=5]": replacement})
        torch.testing.assert_close(got[:, 5], want[:, 5], rtol=0, atol=1e-12, msg=name)
        got[:, 5] = plain[:, 5]
        assert torch.equal(got, plain), name


def test_noise_belongs_to_tokens_and_not_to_calls() -> None:
    whole = patched({X: noise(0.5, seed=3)})
    assert not torch.equal(whole, trace(MODEL, IDS, X)[X])
    assert torch.equal(patched({f"{X}[pos=4]": noise(0.5, seed=3)})[:, 4], whole[:, 4])
    assert not torch.equal(patched({X: noise(0.5, seed=4)}), whole)


def test_heads_channels_and_positions_select_together() -> None:
    z = "layers.0.mixer.z"
    plain, got = trace(MODEL, IDS, z)[z], patched({f"{z}[head=2|5, pos=1:3, channel=-1]": 0.0}, z)
    changed = (plain != got).nonzero()
    assert {tuple(row[1:].tolist()) for row in changed} == {(p, h, 11) for p in (1, 2) for h in (2, 5)}


def test_an_ablated_expert_is_the_model_without_its_weighted_output() -> None:
    run = trace(MODEL, IDS, "layers.1.ffn.*")
    experts, weights = run["layers.1.ffn.bank.experts"], run["layers.1.ffn.router.weights"]
    keep = (run["layers.1.ffn.router.chosen"] != 1)[..., None]
    out = "layers.1.ffn.bank.out"
    want = (experts * weights[..., None] * keep).sum(-2)
    torch.testing.assert_close(patched({"layers.1.ffn.bank.experts[expert=1]": 0.0}, out), want)
    torch.testing.assert_close(patched({"layers.1.ffn.router.weights[expert=1]": 0.0}, out), want)


def test_with_frozen_patterns_and_scales_the_model_is_linear_in_its_values(other: dt.look.Trace) -> None:
    """Frozen norms and patterns, and no ffn: the output is linear in the embedded tokens."""
    fixed = freeze(other, "*.pattern", "*.scale")
    silent = dict.fromkeys((f"layers.{i}.ffn_add" for i in range(3)), 0.0)
    runs = [
        trace(MODEL, IDS, "normed", patch={**fixed, **silent, "embedded": lambda x, a=a: x * a})["normed"] for a in (1.0, 2.0)
    ]
    torch.testing.assert_close(runs[1], 2 * runs[0])
    free = [trace(MODEL, IDS, "normed", patch={**silent, "embedded": lambda x, a=a: x * a})["normed"] for a in (1.0, 2.0)]
    assert (free[1] - 2 * free[0]).abs().max() > 0.1


@torch.no_grad()
def test_a_patch_of_a_state_holds_while_decoding() -> None:
    pool = dt.Pool(MIXED.part, rows=2, capacity=16, dtype=torch.float64)
    address = "layers.0.mixer.state"
    from dovetail.decoding.steps import Decoder

    decoder = Decoder(MIXED, pool, listen=Tracer(MIXED.part, None, {f"{address}[pos=4, row=1]": 0.0}))
    decoder.step(IDS[:, :5], [0, 1])
    got = decoder.step(IDS[:, 5:6], [0, 1])
    plain = Decoder(MIXED, dt.Pool(MIXED.part, rows=2, capacity=16, dtype=torch.float64))
    plain.step(IDS[:, :5], [0, 1])
    want = plain.step(IDS[:, 5:6], [0, 1])
    torch.testing.assert_close(got[0], want[0])
    assert (got[1] - want[1]).abs().max() > 1e-3


def test_attributions_sum_to_the_difference(other: dt.look.Trace) -> None:
    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 7].sum()

    there: dict[str, Replacement] = {"layers.2.in": from_run(other)}
    parts = integrated_gradients(MODEL, IDS, "layers.2.in", metric, baseline=other["layers.2.in"], steps=32)
    here, elsewhere = (metric(trace(MODEL, IDS, "head.logits", patch=p)["head.logits"]) for p in ({}, there))
    torch.testing.assert_close(parts.sum(), here - elsewhere, rtol=1e-4, atol=1e-4)
    assert parts.shape == (2, 9, 28)


def test_a_wrong_shape_says_both() -> None:
    with pytest.raises(InputError, match=r"the replacement has the shape \(3,\), the slice \(2, 1, 28\)"):
        patched({f"{X}[pos=2]": torch.zeros(3)})
    with pytest.raises(InputError, match="the direction has the shape"):
        patched({X: steer(torch.ones(5))})
