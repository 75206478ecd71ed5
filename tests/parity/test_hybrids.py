"""Nemotron-H and Falcon-H1: clamped time steps, older configs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draws import Draw, mamba2
from draws_more import falcon_h1, nemotron_h
from expressible import expressible
from hf_pair import Pair, check_gradients, check_logits, check_there_and_back

from dovetail.base.errors import SpecError
from dovetail.hf.field import value_at
from dovetail.hf.hf import from_hf, to_hf

TYPES = ["linear_attention", "full_attention", "mlp", "moe"]
SMALL: dict[str, Any] = {"model_type": "nemotron_h", "vocab_size": 62, "hidden_size": 28}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("nemotron_h", {**nemotron_h(Draw("clamped")), "time_step_min": 0.6}),
        ("falcon_h1", {**falcon_h1(Draw("clamped")), "time_step_limit": (0.6, 1.1)}),
        ("mamba2", {**mamba2(Draw("clamped")), "time_step_limit": (0.1, 0.9)}),
    ],
)
def test_the_time_step_of_a_whole_pass_is_clamped(family: str, fields: dict[str, Any]) -> None:
    """Their decoding does not clamp it, so greedy tokens are not compared."""
    pair = Pair(family, fields, 3)
    check_logits(pair, [17, 9, 1])
    check_there_and_back(pair)
    check_gradients(pair, 15)
    free = {name: 1e-12 if name == "time_step_min" else [0.0, float("inf")] for name in fields if name.startswith("time_step")}
    other = Pair(family, {**fields, **free}, 3)  # the same weights: it is the clamp that is compared
    tokens = torch.tensor(pair.prompts([9]))
    assert not torch.allclose(pair.ours(tokens), other.ours(tokens), rtol=1e-3)


def test_a_pattern_of_letters_is_the_list_of_types() -> None:
    assert from_hf({**SMALL, "hybrid_override_pattern": "M*-E"}) == from_hf({**SMALL, "layers_block_type": TYPES})
    assert from_hf({**SMALL, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4}) == from_hf(
        {**SMALL, "layers_block_type": ["mamba", "attention", "mlp", "moe"]}
    )
    spec = from_hf({**SMALL, "hybrid_override_pattern": "M*-E"})
    branches = [(block.mixer and block.mixer.kind, block.ffn and block.ffn.kind) for block in spec.layers]
    assert branches == [("mamba2", None), ("attention", None), (None, "mlp"), (None, "moe")]
    assert to_hf(spec).dialect == "nemotron_h"
    assert to_hf(spec).config["layers_block_type"] == TYPES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers_block_type": ["mamba", "swin"]}, "config.layers_block_type.1: 'swin' is unsupported (supported: linear_att"),
        ({"hybrid_override_pattern": "M?"}, "config.layers_block_type.1: '?' is unsupported"),
        ({"layers_block_type": TYPES, "num_hidden_layers": 3}, "config.layers_block_type: has 4 types, not one for each of 3"),
        ({"moe_latent_size": 16, "mlp_bias": True}, "config.mlp_bias: is true, but the projections to and from a latent of 16"),
        ({"use_bias": True}, "config.use_bias: True is unsupported"),
        ({"tie_word_embeddings": True}, "config.tie_word_embeddings: True is unsupported"),
    ],
)
def test_the_refusal_names_the_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_hf({**SMALL, **change})
    assert says in str(refused.value)


def test_a_layer_of_two_branches_is_refused_by_its_path() -> None:
    spec = from_hf({**SMALL, "layers_block_type": TYPES}).set("layers.0.ffn", {"kind": "mlp", "act": "relu2", "bias": False})
    with pytest.raises(SpecError) as refused:
        to_hf(spec, "nemotron_h")
    assert refused.value.path == "layers.0.ffn"


def test_a_norm_of_other_groups_than_the_heads_is_refused_by_its_path() -> None:
    spec = from_hf({**SMALL, "n_groups": 2}).set("layers.0.mixer.norm.groups", 4)
    assert expressible(spec) is None
    with pytest.raises(SpecError) as refused:
        to_hf(spec, "nemotron_h")
    assert refused.value.path == "layers.0.mixer.norm.groups"


@pytest.mark.parametrize("factor", [0.1, 0.3, 0.39062499999999994, 1.7, 5.656854249492381])
def test_a_factor_of_the_keys_is_our_scale_and_comes_back(factor: float) -> None:
    config = {**falcon_h1(Draw("keys")), "model_type": "falcon_h1", "key_multiplier": factor}
    for head in (6, 10, 64, 80, 128):
        spec = from_hf({**config, "head_dim": head})
        assert value_at(spec, "layers.*.mixer.scale") == pytest.approx(factor / head**0.5)
        written = to_hf(spec, "falcon_h1").config
        assert from_hf(written) == from_hf({**written, "key_multiplier": factor})
