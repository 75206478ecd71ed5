"""Sweeps that leave out the tokens before an intervention give what a full forward pass per intervention gives."""

from __future__ import annotations

import pytest
import torch
from tiny import HYBRID, IDS, OTHER, SPEC
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.look.intervention import Replacement, freeze, from_run, noise, steer
from dovetail.look.sweeps import ablate, sweep
from dovetail.look.tracer import trace
from dovetail.model.model import Model, ModelModule
from dovetail.proof.laws.case import perturbed

MIXERS = {
    "latents": "{kind: mla, heads: 4, kv_rank: 10, nope: 6, rope: 4, value: 6}",
    "deltanet": "{kind: gated_deltanet, heads: 4, key_heads: 2}",
    "mamba": "{kind: mamba2, inner: 60, head: 6, state_size: 5}",
    "rwkv": "{kind: rwkv6, heads: 4, mix_rank: 8, decay_rank: 12}",
    "blocks": "{kind: nsa, heads: 6, kv_heads: 2, head: 12, block: 4, top: 1, window: 5}",
    "window": "{heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 3}]}",
    "prefix": "{heads: 6, kv_heads: 2, head: 12, mask: {any: [causal, {kind: prefix, length: 3}]}}",
}
FULL = {
    "bidirectional": ("{heads: 6, head: 12, mask: full}", "early tokens"),
    "low rank": ("{kind: linformer, heads: 6, head: 12, rank: 3}", "early tokens"),
    "length": ("{heads: 6, head: 12, position: {kind: rope, scaling: {kind: dynamic_ntk, original: 4}}}", "current length"),
}


def layered(mixer: str, more: str = "") -> Model:
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{{repeat: 2, mixer: {mixer}, ffn: {{hidden: 44}}{more}}}]}}")


SHARED = from_yaml("""
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
- {mixer: {heads: 6, kv_heads: 2, head: 12, earlier: {kind: shared_kv, layer: 0}}, ffn: {hidden: 44}}
""")
CAUSAL = {
    "attention and experts": SPEC,
    "hybrid": HYBRID,
    **{name: layered(mixer) for name, mixer in MIXERS.items()},
    "residual streams": layered("{heads: 6, head: 12}", ", wire: {kind: mhc, count: 3}"),
    "shared keys": SHARED,
}


def margins(logits: Tensor) -> Tensor:
    """A metric of every token, so that one that was left out wrongly shows."""
    weight = torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype).view(logits.shape[1:])
    return (logits * weight).flatten(1).sum(1)


def single(model: ModelModule, ids: Tensor, patch: dict[str, Replacement]) -> float:
    return float(margins(trace(model, ids, "head.logits", patch=patch)["head.logits"]).mean())


def largest_gap(model: ModelModule, over: str, patch: dict[str, Replacement] | None = None) -> float:
    """Between a sweep and single patches in full forward passes."""
    patch = patch or {}
    result, run = sweep(model, IDS, OTHER, over, margins, patch=patch, batch=3), trace(model, IDS, "*", patch=patch)
    gaps = [abs(value - single(model, OTHER, {**patch, key: from_run(run)})) for key, value in result.metric.items()]
    assert gaps
    return max(gaps) / max(1.0, *map(abs, result.metric.values()))


@pytest.mark.parametrize("spec", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("over", ["layers.*.in[pos]", "layers.*.mixer_add[pos]", "embedded[pos]"])
def test_tokens_before_an_intervention_are_those_of_the_base_run(spec: Model, over: str) -> None:
    model = perturbed(spec)
    assert largest_gap(model, over) < 1e-12
    work = sweep(model, IDS, OTHER, over, margins, batch=3).work
    assert work is not None
    assert not work.every_token
    assert work.computed < 0.8 * work.full


@pytest.mark.parametrize(("mixer", "why"), FULL.values(), ids=FULL)
def test_what_reads_across_computes_every_token_and_says_so(mixer: str, why: str) -> None:
    model = perturbed(layered(mixer))
    assert largest_gap(model, "layers.*.in[pos]") < 1e-12
    result = sweep(model, IDS, OTHER, "layers.*.in[pos]", margins)
    assert result.work is not None
    assert why in result.work.every_token
    assert why in repr(result)


def test_a_function_of_several_tokens_computes_every_token_and_says_so() -> None:
    model = perturbed(SPEC)

    def centered(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    assert largest_gap(model, "layers.1.in[pos]", {"layers.0.mixer_add": centered}) < 1e-12
    result = ablate(model, IDS, "layers.1.in[pos]", margins, value=centered)
    assert result.work is not None
    assert "several tokens" in result.work.every_token
    for key, value in result.metric.items():
        assert value == pytest.approx(single(model, IDS, {key: centered}), abs=1e-10)


@pytest.mark.parametrize("value", [0.0, noise(0.3, 7), steer(torch.arange(28.0), 2.0)], ids=["zero", "noise", "steer"])
def test_ablations_leave_out_tokens(value: Replacement) -> None:
    model = perturbed(HYBRID)
    result = ablate(model, IDS, "layers.*.in[pos]", margins, value=value, batch=2)
    for key, number in result.metric.items():
        assert number == pytest.approx(single(model, IDS, {key: value}), abs=1e-10)
    assert result.work is not None
    assert result.work.computed < 0.7 * result.work.full


def test_what_holds_in_every_run_holds_in_the_tokens_before() -> None:
    """Also where it is given by a position from the end, which the base run computes in pieces."""
    for spec in (SPEC, HYBRID):
        model = perturbed(spec)
        frozen = freeze(trace(model, IDS, "layers.*.mixer_norm.scale"))
        patches = (frozen, {"layers.0.in[pos=-3]": 0.0}, {"layers.1.in": noise(0.2, 3)}, {"layers.0.in[row=1]": noise(0.2, 4)})
        for patch in patches:
            assert largest_gap(model, "layers.*.ffn_add[pos]", dict(patch)) < 1e-12


def test_a_patch_of_all_rows_sees_the_rows_of_its_run_only() -> None:
    model = perturbed(SPEC)
    value = torch.arange(2.0 * 28).view(2, 1, 28).to(torch.float64)
    patches: list[dict[str, Replacement]] = [{"layers.0.mixer_add": lambda x: x.roll(1, 0)}, {"layers.0.in[pos=4]": value}]
    for patch in [*patches, {"layers.0.in[pos=4, row=1]": value[1:]}]:
        assert largest_gap(model, "layers.1.in[pos]", patch) < 1e-12


def test_heads_start_at_the_first_token_that_differs() -> None:
    """Both runs agree on two tokens, and on all tokens there is nothing to compute."""
    model = perturbed(SPEC)
    assert largest_gap(model, "layers.*.mixer.z[head]") < 1e-12
    work = sweep(model, IDS, OTHER, "layers.*.mixer.z[head]", margins).work
    same = sweep(model, IDS, IDS, "layers.*.mixer.z[head]", margins)
    assert work is not None
    assert same.work is not None
    assert same.work.computed < work.computed < 0.85 * work.full
    assert set(same.metric.values()) == {same.clean}
