from __future__ import annotations

import pytest
from tiny import IDS, MIXED, MODEL, OTHER
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.look.intervention import Replacement, from_run, mean_of
from dovetail.look.sweeps import ablate, attribution_patching, path_patching, skip_layers, sweep
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule


def margin(logits: Tensor) -> Tensor:
    return logits[:, -1, 7] - logits[:, -1, 11]


def one_by_one(model: ModelModule, patch: dict[str, Replacement]) -> float:
    return float(margin(trace(model, OTHER, "head.logits", patch=patch)["head.logits"]).mean())


@pytest.mark.parametrize("model", [MODEL, MIXED], ids=["attention", "hybrid"])
def test_a_sweep_is_what_single_patches_give(model: ModelModule) -> None:
    run = trace(model, IDS, "*")
    done: list[tuple[int, int]] = []
    result = sweep(model, IDS, OTHER, "layers.*.resid[pos]", margin, batch=5, progress=lambda *n: done.append(n))
    layers = len(model.part.layers)
    assert len(result.metric) == 9 * layers
    assert done[-1] == (9 * layers, 9 * layers)
    for key in ("layers.0.in[pos=2]", "layers.1.in[pos=8]", "layers.1.in[pos=0]"):
        assert result.metric[key] == pytest.approx(one_by_one(model, {key: from_run(run)}), abs=1e-9)
    effects = result.effects()
    assert effects["layers.0.in[pos=2]"] == pytest.approx(1.0)  # the only token that differs
    assert effects["layers.0.in[pos=3]"] == pytest.approx(0.0, abs=1e-12)
    names, table = result.table()
    assert table.shape == (layers, 9)
    assert names == [f"layers.{i}.in" for i in range(layers)]
    assert repr(result).startswith("clean ")


def test_heads_experts_and_embeddings_are_swept() -> None:
    heads = sweep(MODEL, IDS, OTHER, ["layers.*.mixer.z[head]", "embedded[pos]"], margin)
    assert len(heads.metric) == 3 * 6 + 9
    assert heads.effects()["embedded[pos=2]"] == pytest.approx(1.0)
    experts = ablate(MODEL, IDS, "layers.1.ffn.bank.experts[expert]", margin)
    assert list(experts.metric) == [f"layers.1.ffn.bank.experts[expert={e}]" for e in range(4)]
    gone = trace(MODEL, IDS, "head.logits", patch={"layers.1.ffn.bank.experts[expert=2]": 0.0})["head.logits"]
    assert experts.metric["layers.1.ffn.bank.experts[expert=2]"] == pytest.approx(float(margin(gone).mean()), abs=1e-9)


def test_ablation_by_the_mean() -> None:
    run = trace(MODEL, OTHER, "layers.2.mixer.z")
    result = ablate(MODEL, IDS, "layers.2.mixer.z[head]", margin, value=mean_of(run))
    want = trace(MODEL, IDS, "head.logits", patch={"layers.2.mixer.z[head=3]": mean_of(run)})["head.logits"]
    assert result.metric["layers.2.mixer.z[head=3]"] == pytest.approx(float(margin(want).mean()), abs=1e-9)


def test_a_skipped_layer_is_the_identity() -> None:
    result = skip_layers(MODEL, IDS, margin)
    gone = trace(MODEL, IDS, "head.logits", patch={"layers.1.*_add": 0.0})["head.logits"]
    assert result.metric["layers.1"] == pytest.approx(float(margin(gone).mean()), abs=1e-9)


def test_a_path_leaves_out_what_other_branches_pass_on() -> None:
    """A sender in layer 0 and the residual stream before layer 1 as the receiver: the direct path is all there is. Into the
    last residual stream, the direct path is not all that patching the sender does."""
    sender = "layers.0.mixer_add"
    source = trace(MODEL, IDS, sender)
    direct = path_patching(MODEL, IDS, OTHER, sender, ["layers.1.in"], margin)
    held = trace(MODEL, OTHER, "layers.0.ffn_add")
    want = one_by_one(MODEL, {sender: from_run(source), "layers.0.ffn_add": from_run(held)})
    assert next(iter(direct.metric.values())) == pytest.approx(want, abs=1e-9)
    late = path_patching(MODEL, IDS, OTHER, sender, ["normed"], margin)
    assert next(iter(late.metric.values())) != pytest.approx(one_by_one(MODEL, {sender: from_run(source)}), abs=1e-6)


def test_attribution_patching_estimates_and_says_how_well() -> None:
    near = OTHER.clone()
    exact = sweep(MODEL, IDS, near, "layers.*.resid[pos]", margin)
    estimate = attribution_patching(MODEL, IDS, near, "layers.*.resid[pos]", margin)
    assert estimate.metric.keys() == exact.metric.keys()
    assert estimate.estimated
    assert 0 < estimate.error(exact) < 5
    assert exact.error(exact) == 0
    assert estimate.effects()["layers.0.in[pos=3]"] == pytest.approx(0.0, abs=1e-12)


def test_clean_and_corrupt_have_one_shape() -> None:
    with pytest.raises(InputError, match="positions must correspond"):
        sweep(MODEL, IDS, OTHER[:, :5], "layers.*.resid[pos]", margin)
