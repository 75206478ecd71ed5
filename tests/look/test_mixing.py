from __future__ import annotations

import pytest
import torch
from tiny import IDS, MIXED, MODEL

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.look.mixing import patterns, rollout, routing
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule
from dovetail.nn.groups import CrossMixer, Mixer
from dovetail.proof.laws.case import perturbed
from dovetail.spec.part import KINDS

MIXERS = {kind: part for kind, part in KINDS.items() if issubclass(part, Mixer) and not issubclass(part, CrossMixer)}
LINEAR = [kind for kind, part in MIXERS.items() if part.recurrent and part.values]
OTHER = [kind for kind, part in MIXERS.items() if part.recurrent and not part.values]


def model_of(kind: str) -> ModelModule:
    return perturbed(from_yaml(f"{{width: 64, vocab: 62, layers: [{{mixer: {kind}, ffn: {{hidden: 44}}}}]}}"))


def weighed(pattern: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    v = values.reshape(*values.shape[:3], -1).transpose(1, 2)
    return (pattern @ v).transpose(1, 2).reshape(like.shape)


def test_every_scan_is_linear_or_says_that_it_is_not() -> None:
    assert set(LINEAR) >= {"mamba", "mamba2", "s4", "linear_attention", "gla", "gated_deltanet", "rwkv6"}
    assert set(OTHER) >= {"rnn", "lstm", "gru"}


@pytest.mark.parametrize("kind", LINEAR)
def test_effective_attention_times_values_is_y(kind: str) -> None:
    model, name = model_of(kind), MIXERS[kind].values
    ids = torch.cat([IDS, IDS.flip(0)], 1)
    run = trace(model, ids, f"layers.0.mixer.{name}", "layers.0.mixer.y")
    pattern = patterns(model, ids)["layers.0.mixer.pattern"]
    y = run["layers.0.mixer.y"]
    assert (weighed(pattern, run[f"layers.0.mixer.{name}"], y) - y).abs().max() <= 1e-12 * y.abs().max().clamp_min(1)
    assert pattern.triu(1).abs().max() == 0


@pytest.mark.parametrize("kind", OTHER)
def test_other_scans_have_none(kind: str) -> None:
    with pytest.raises(SpecError, match=rf"layers\.0\.mixer: {kind} computes no attention pattern and is not linear"):
        patterns(model_of(kind), IDS)


def test_softmax_and_effective_patterns_stand_side_by_side() -> None:
    maps = patterns(MIXED, IDS)
    assert list(maps) == ["layers.0.mixer.pattern", "layers.1.mixer.pattern"]
    assert maps["layers.0.mixer.pattern"].shape == (2, 10, 9, 9)
    torch.testing.assert_close(maps["layers.1.mixer.pattern"].sum(-1), torch.ones(2, 2, 9, dtype=torch.float64))
    assert list(patterns(MIXED, IDS, [-1])) == ["layers.1.mixer.pattern"]
    with pytest.raises(SpecError, match=r"layers\.2: there is no such layer"):
        patterns(MIXED, IDS, [2])


@pytest.mark.parametrize("kind", ["mamba", "gated_deltanet"])
def test_padding_and_other_documents_are_not_mixed(kind: str) -> None:
    model = model_of(kind)
    packed = dt.TokenLayout.of(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), torch.tensor([[0] * 4 + [1] * 5]))
    both = patterns(model, IDS[:1], ctx=dt.Ctx(layout=packed))["layers.0.mixer.pattern"]
    first = patterns(model, IDS[:1, :4])["layers.0.mixer.pattern"]
    second = patterns(model, IDS[:1, 4:])["layers.0.mixer.pattern"]
    torch.testing.assert_close(both[..., :4, :4], first, rtol=0, atol=1e-12)
    torch.testing.assert_close(both[..., 4:, 4:], second, rtol=0, atol=1e-12)
    assert both[..., 4:, :4].abs().max() <= 1e-12


def test_a_scan_that_is_not_linear_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MIXERS["mamba2"], "values", "dt")
    with pytest.raises((SpecError, RuntimeError)):
        patterns(model_of("mamba2"), IDS)


def test_weighted_maps_and_rollout() -> None:
    maps, weighted = patterns(MODEL, IDS), patterns(MODEL, IDS, weighted=True)
    values = trace(MODEL, IDS, "layers.0.mixer.values")["layers.0.mixer.values"].norm(dim=-1)
    want = maps["layers.0.mixer.pattern"] * values[:, None, :, 1:2].expand(-1, 3, -1, -1).transpose(-1, -2).repeat(1, 2, 1, 1)
    torch.testing.assert_close(weighted["layers.0.mixer.pattern"][:, 3:], want[:, 3:])
    for model in (MODEL, MIXED):
        flow = rollout(model, IDS)
        torch.testing.assert_close(flow.sum(-1), torch.ones(2, 9, dtype=torch.float64))
        assert flow.triu(1).abs().max() == 0
        depth = len(model.part.layers)
        for cut in range(1, depth):  # the later layers read what the earlier ones mixed
            earlier, later = (rollout(model, IDS, layers) for layers in (range(cut), range(cut, depth)))
            torch.testing.assert_close(flow, later @ earlier)
    with pytest.raises(SpecError, match="declares no tap of its values"):
        patterns(model_of("mla"), IDS, weighted=True)


def test_routing_is_the_weight_of_every_expert() -> None:
    weights = routing(MODEL, IDS)["layers.1.ffn.router.weights"]
    assert weights.shape == (2, 9, 4)
    assert bool(((weights > 0).sum(-1) == 2).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9, dtype=torch.float64))
    with pytest.raises(SpecError, match="the model has no router of experts"):
        routing(MIXED, IDS)


def test_cross_attention_stands_beside_and_large_scans_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = "{width: 20, vocab: 62, head: null, layers: [{mixer: {heads: 2, mask: full}}]}"
    layers = "[{mixer: mamba, cross: {kind: attention, heads: 2}, ffn: null}]"
    model = perturbed(from_yaml(f"{{width: 28, vocab: 62, encoder: {encoder}, layers: {layers}}}"))
    encoded, source = model.encode(IDS[:, :7], dt.Ctx(layout=dt.TokenLayout.whole(2, 7)))
    ctx = dt.Ctx(layout=dt.TokenLayout.whole(2, 9), encoder_output=encoded, encoder_layout=source)
    maps = patterns(model, IDS, ctx=ctx)
    shapes = {key: tuple(x.shape[1:]) for key, x in maps.items()}
    assert shapes == {"layers.0.mixer.pattern": (56, 9, 9), "layers.0.cross.pattern": (2, 9, 7)}
    assert rollout(model, IDS, ctx=ctx).shape == (2, 9, 9)
    monkeypatch.setattr("dovetail.look.mixing.AT_ONCE", 1)
    torch.testing.assert_close(patterns(model, IDS, ctx=ctx)["layers.0.mixer.pattern"], maps["layers.0.mixer.pattern"])
