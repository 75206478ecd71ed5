from __future__ import annotations

import pytest
import torch
from tiny import IDS, MIXED, MODEL
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import InputError, SpecError
from dovetail.files.spec import from_yaml
from dovetail.look.components import attribute
from dovetail.look.gradient import gradient_times_input
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule
from dovetail.proof.laws.case import perturbed

HEADS = "layers: [{repeat: 2, mixer: {heads: 2, bias: true, out_bias: true, gate: true}, ffn: {kind: mlp, hidden: 44}}]"
OTHERS = {
    "soft-cap": "head: {kind: lm, softcap: 3.0, bias: true}, " + HEADS,
    "dense head": "head: masked_lm, norm: layernorm, " + HEADS,
    "post-norm": "norm: null, layers: [{repeat: 2, norm: layernorm, wire: post_norm, mixer: {heads: 2}, ffn: {hidden: 44}}]",
    "scaled": "layers: [{repeat: 2, wire: {kind: sandwich_norm, stream_scale: true, multiplier: 0.5}, mixer: {heads: 2}}]",
    "side by side": "layers: [{kind: hybrid_block, ssm_out: 0.7, mixer: {heads: 2}, ssm: {kind: mamba2, inner: 60, head: 6}}]",
    "rwkv": "layers: [{repeat: 2, mixer: {kind: rwkv6, heads: 4, eps: 0.1}, ffn: {hidden: 44}}]",
    "residual streams": "layers: [{repeat: 2, wire: {kind: mhc, count: 3}, mixer: {heads: 2}, ffn: {hidden: 44}}]",
    "deltanet": "layers: [{mixer: {kind: gated_deltanet, heads: 4}}, {mixer: {kind: mamba}}]",
}


def other(name: str) -> ModelModule:
    return perturbed(from_yaml(f"{{width: 28, vocab: 62, {OTHERS[name]}}}"))


def sum_of(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(parts.values())).sum(0)


@pytest.mark.parametrize("by", ["component", "head", "token", "layers.0.ffn.hidden[channel]", "embedded[pos]"])
@pytest.mark.parametrize("model", [MODEL, MIXED], ids=["attention", "hybrid"])
def test_attributions_sum_to_a_logit_and_to_a_difference(model: ModelModule, by: str) -> None:
    logits = trace(model, IDS, "head.logits")["head.logits"][:, -1]
    one, two = attribute(model, IDS, 17, by), attribute(model, IDS, (17, 4), by)
    torch.testing.assert_close(sum_of(one.parts), logits[:, 17], rtol=0, atol=1e-9)
    torch.testing.assert_close(sum_of(two.parts), logits[:, 17] - logits[:, 4], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_other_wires_and_heads(name: str) -> None:
    model = other(name)
    logits = trace(model, IDS, "head.logits")["head.logits"][:, -1]
    for by in ("component", "head", "token"):
        torch.testing.assert_close(
            sum_of(attribute(model, IDS, (17, 4), by).parts), logits[:, 17] - logits[:, 4], rtol=0, atol=1e-9
        )


def test_a_component_without_effect_has_none_and_the_last_branch_has_that_of_its_ablation() -> None:
    """The last branch reaches the logits only through the final norm, whose scale is frozen."""
    scale = trace(MODEL, IDS, "norm.scale")["norm.scale"]
    parts = attribute(MODEL, IDS, 17).parts
    gone = trace(MODEL, IDS, "head.logits", patch={"layers.2.ffn_add": 0.0, "norm.scale": scale})["head.logits"]
    with_ = trace(MODEL, IDS, "head.logits")["head.logits"]
    torch.testing.assert_close(parts["layers.2.ffn_add"], (with_ - gone)[:, -1, 17], rtol=0, atol=1e-9)
    silent = attribute(MODEL, IDS, lambda logits: logits[:, 0, 17], "token").parts
    assert silent["layers.1.mixer.values[key=5]"].abs().max() == 0  # the first token sees no later one


def test_heads_and_experts_split_what_their_branch_adds() -> None:
    whole, heads, experts = (attribute(MODEL, IDS, 17, by).parts for by in ("component", "head", "expert"))
    own = {key: x for key, x in heads.items() if key.startswith("layers.0.mixer")}
    torch.testing.assert_close(sum_of(own), whole["layers.0.mixer_add"], rtol=0, atol=1e-9)
    each = [experts[f"layers.1.ffn.bank.experts[expert={e}]"] for e in range(4)]
    torch.testing.assert_close(torch.stack(each).sum(0), whole["layers.1.ffn_add"], rtol=0, atol=1e-9)
    last = trace(MODEL, IDS, "layers.1.ffn.router.chosen")["layers.1.ffn.router.chosen"][0, -1].tolist()
    assert [e for e in range(4) if each[e][0] != 0] == sorted(last)


def test_what_is_not_linear_is_refused() -> None:
    with pytest.raises(InputError, match=r"layers\.0\.mixer_add: is not linear in layers\.0\.mixer\.x"):
        attribute(perturbed(from_yaml("{width: 28, vocab: 62, layers: [{mixer: s4}]}")), IDS, 17, "token")
    with pytest.raises(SpecError, match="no branch of this model has activations per expert"):
        attribute(MIXED, IDS, 17, "expert")
    with pytest.raises(SpecError, match="is not in a branch of a layer"):
        attribute(MODEL, IDS, 17, "normed[pos]")
    with pytest.raises(InputError, match="return one number per row"):
        attribute(MODEL, IDS, lambda logits: logits.sum())


def test_the_last_token_of_a_padded_row() -> None:
    ctx = dt.Ctx(layout=dt.TokenLayout.padded([9, 4], 9))
    padded, alone = attribute(MODEL, IDS, 17, ctx=ctx), attribute(MODEL, IDS[1:, :4], 17)
    for key, x in alone.parts.items():
        torch.testing.assert_close(padded.parts[key][1:], x, rtol=0, atol=1e-9)
    assert repr(alone).splitlines()[0].endswith("in all (mean over rows); largest first")


def test_gradient_times_input_is_the_first_order_of_an_ablation() -> None:
    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 17].sum()

    first = gradient_times_input(MODEL, IDS, "layers.0.mixer.z", metric)
    run = trace(MODEL, IDS, "layers.0.mixer.z")["layers.0.mixer.z"]
    patches = [{"layers.0.mixer.z": run * by} for by in (1 + 1e-5, 1 - 1e-5)]
    more, less = (metric(trace(MODEL, IDS, "head.logits", patch=patch)["head.logits"]) for patch in patches)
    assert float(first.sum()) == pytest.approx(float(more - less) / 2e-5, rel=1e-6)


def test_the_heads_of_a_norm_of_their_own_are_attributed_with_its_scale_frozen() -> None:
    """RWKV-6 normalizes what each head returns."""
    model = other("rwkv")
    for by, name in (("head", "y[head=2]"), ("token", "v[pos=4]")):
        parts = attribute(model, IDS, 17, by).parts
        assert float(parts[f"layers.1.mixer.{name}"].abs().min()) > 1e-6
    run = trace(model, IDS, "layers.1.mixer.scale", "norm.scale", "layers.1.ffn_add")
    gone = trace(model, IDS, "head.logits", patch={**run, "layers.1.mixer.y[head=2]": 0.0})["head.logits"]
    kept = trace(model, IDS, "head.logits")["head.logits"]
    own = attribute(model, IDS, 17, "head").parts["layers.1.mixer.y[head=2]"]
    torch.testing.assert_close(own, (kept - gone)[:, -1, 17], rtol=0, atol=1e-9)
