"""Gemma 4's text model: all mechanisms in one model, both forms of its sizes, tensors that files hold in vain, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_pair import Pair, check_gradients, check_greedy, check_logits, check_there_and_back

from dovetail.base.errors import SpecError
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.resolved import explicit
from dovetail.hf.shrink import shrink
from dovetail.hf.tensors import DroppedTensors
from dovetail.model.construction import build
from dovetail.nn.module import tensor_at

S, F = "sliding_attention", "full_attention"
ALL: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 28,
    "intermediate_size": 44,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 16,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "layer_types": [S, S, F, S, F, F],
    "sliding_window": 5,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 62,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
    "final_logit_softcapping": 3.0,
    "pad_token_id": None,
}


def read(**changed: Any) -> Any:
    """The spec of the config with some fields changed; those that are `...` are left out."""
    config = {"model_type": "gemma4_text", **ALL, **changed}
    return from_hf({name: value for name, value in config.items() if value is not ...})


@pytest.mark.slow
def test_all_mechanisms_together():
    """Layers 3 to 5 read the keys and values of 1 and 2, and decode far beyond their window."""
    pair = Pair("gemma4_text", ALL, 3)
    assert [getattr(block.mixer.earlier, "layer", None) for block in pair.spec.layers] == [None, None, None, 1, 2, 2]
    assert [block.ffn.dense.hidden for block in pair.spec.layers] == [44, 44, 44, 88, 88, 88]
    assert [block.mixer.k_is_v for block in pair.spec.layers] == [False, False, True, False, False, False]
    check_logits(pair, [17, 9, 1])
    check_there_and_back(pair)
    check_greedy(pair, [9, 4, 6], new=64)
    check_gradients(pair, 15)


def test_both_forms_of_the_sizes_of_full_layers_are_one_spec():
    full = {"head_dim": 16, "num_key_value_heads": 3}
    assert (
        read(per_layer_config={"2": full, "4": full, "5": full}, global_head_dim=..., num_global_key_value_heads=...) == read()
    )
    assert read(per_layer_config={2: full, "04": full, "5": full}) == read()
    assert {block.mixer.head for block in read(per_layer_config={}).layers} == {12}
    ungated = [(block.mixer.head, block.mixer.kv_heads) for block in read(attention_k_eq_v=False).layers]
    assert ungated == [(12, 2), (12, 2), (16, 2), (12, 2), (16, 2), (16, 2)]


def test_the_last_layer_is_full_and_text_is_causal():
    assert read(layer_types=[S, S, F, S, F, S]) == read() == read(use_bidirectional_attention="vision")


def test_one_norm_of_what_is_found_serves_all_layers():
    model = build(read())
    norms = {id(tensor_at(model, f"layers.{i}.ple.found_norm.scale")) for i in range(6)}
    assert len(norms) == 1


def test_tables_of_all_layers_are_one_tensor():
    spec = read()
    tensors = {name: t.clone() for name, t in build(spec, seed=1).state_dict().items()}
    theirs = export_tensors(spec, stored(tensors))
    joined = theirs["model.embed_tokens_per_layer.weight"]
    assert joined.shape == (62, 6 * 5)
    for i in range(6):
        assert joined[:, 5 * i : 5 * i + 5].equal(tensors[f"layers.{i}.ple.table"])
        rows = theirs["model.per_layer_model_projection.weight"][5 * i : 5 * i + 5]
        assert rows.equal(tensors[f"layers.{i}.ple.project.weight"])


def test_keys_and_values_of_sharing_layers_are_dropped_with_a_warning():
    spec, names = read(), ("k_proj", "v_proj", "k_norm")
    theirs = export_tensors(spec, stored(build(spec).state_dict()))
    dead = {f"model.layers.{i}.self_attn.{name}.weight": torch.zeros(3) for i in (3, 4) for name in names}
    with pytest.warns(DroppedTensors) as dropped:
        read_back = import_tensors(spec, {**theirs, **dead})
    messages = sorted(str(one.message) for one in dropped)
    assert [message.partition(":")[0] for message in messages] == sorted(f"*.self_attn.{name}*" for name in names)
    assert all("2 tensors, 24 bytes" in message for message in messages)
    assert all(tensor.equal(read_back[name]) for name, tensor in import_tensors(spec, theirs).items())


def stored(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors without those that are tied to one of layer 0."""
    return {name: tensor for name, tensor in tensors.items() if "found_norm" not in name or ".0." in name}


def test_a_small_one_of_the_default_config_is_written():
    spec = from_hf({"model_type": "gemma4_text", "vocab_size": 262144, **_required()})
    small = shrink(spec, "gemma4_text")
    assert explicit(from_hf(to_hf(small, "gemma4_text").config)) == explicit(small)


def _required() -> dict[str, int]:
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8}
    assert {*sizes, "vocab_size"} == set(DIALECTS["gemma4_text"].required)
    return sizes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "config.use_bidirectional_attention: 'all' is unsupported"),
        ({"vocab_size_per_layer_input": ...}, "config.vocab_size_per_layer_input: 262144 rows differ"),
        ({"num_kv_shared_layers": 6}, "config.num_kv_shared_layers: 6 of 6 layers leave none"),
        ({"num_kv_shared_layers": 4}, "config.num_kv_shared_layers: layer 2 is of type full_attention"),
        ({"num_experts": None}, "config.num_experts: is missing"),
        ({"enable_moe_block": 1}, "config.enable_moe_block: 1 is not true or false"),
        ({"use_double_wide_mlp": "yes"}, "config.use_double_wide_mlp: 'yes' is not true or false"),
        ({"attention_k_eq_v": 1}, "config.attention_k_eq_v: 1 is not true or false"),
        ({"top_k_experts": 5}, "top_k: 5 is more than the 4 experts"),
        ({"per_layer_config": 3}, "config.per_layer_config: 3 is not a mapping"),
        ({"per_layer_config": {"7": {}}}, "config.per_layer_config.7: is not one of the 6 layers"),
        ({"per_layer_config": {"2": {"skip": ["mlp"]}}}, "config.per_layer_config.2: .* is unsupported"),
        ({"per_layer_config": {"2": {"head_dim": 16}}}, "config.per_layer_config.4: differs from layer 2"),
        ({"rope_parameters": {"full_attention": None}}, "config.rope_parameters.sliding_attention: None is not a mapping"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "config.rope_parameters: .* is not a mapping of sliding_attention"),
        (
            {"rope_parameters": {S: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, F: {"rope_theta": 1e4}}},
            "config.rope_parameters.sliding_attention.partial_rotary_factor: 0.5 is unsupported",
        ),
        ({"query_pre_attn_scalar": 256}, "config.query_pre_attn_scalar: is not a known field of gemma4_text"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        read(**changed)


def test_a_spec_that_it_cannot_express_is_refused_by_its_path():
    values = {"layers.0.mixer.scale": 0.5, "layers.1.ple.shares_norm": None, "layers.0.wire.stream_scale": False}
    for path, value in values.items():
        with pytest.raises(SpecError, match=path):
            to_hf(read().set(path, value), "gemma4_text")
