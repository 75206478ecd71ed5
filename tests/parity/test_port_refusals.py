"""What a dialect cannot say is an error with the path of the part; what we do not know in a config or a file is one too."""

from __future__ import annotations

import dataclasses as dc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expressible import expressible
from hypothesis import given, settings, strategies as st

import dovetail.hf
from dovetail.base.errors import DovetailError, FileError, SpecError
from dovetail.files.spec import changed, from_yaml, load_spec
from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.resolved import explicit
from dovetail.hf.tensors import DroppedTensors
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.spec.fold import parameters

LLAMA = from_yaml(
    """
width: 28
vocab: 62
layers: [{repeat: 3, mixer: {kind: attention, heads: 4, kv_heads: 2, head: 12}, ffn: {kind: glu, hidden: 44}}]
"""
)
GPT2 = from_yaml(
    """
width: 28
vocab: 62
position: {kind: learned, length: 40}
norm: layernorm
layers:
  - repeat: 2
    norm: layernorm
    mixer: {kind: attention, heads: 4, position: none, bias: true, out_bias: true}
    ffn: {kind: mlp, hidden: 44}
"""
)
# config.json of meta-llama/Meta-Llama-3.1-8B and of gpt2, as they lie on the hub
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
GPT2_SMALL = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def test_configs_of_the_hub_are_read() -> None:
    assert parameters(from_hf(LLAMA_31_8B)) == 8_030_261_248
    assert parameters(from_hf(GPT2_SMALL)) == 124_439_808


def test_a_config_is_plain_data() -> None:
    for spec in (LLAMA, GPT2):
        config = json.loads(json.dumps(to_hf(spec).config))
        assert explicit(dc.replace(from_hf(config), init=spec.init)) == explicit(spec)


def test_each_dialect_is_found() -> None:
    assert expressible(LLAMA) == "llama"
    assert expressible(GPT2) == "gpt2"
    assert expressible(LLAMA.set("layers.*.mixer.sink", True)) is None


@pytest.mark.parametrize(
    ("spec", "sets", "path", "said"),
    [
        (LLAMA, ["layers.*.mixer.position=alibi"], "layers.0.mixer.position", "alibi cannot be written as llama"),
        (LLAMA, ["layers.1.mixer.kv_heads=4"], "layers.1.mixer.kv_heads", "4 cannot be written as llama"),
        (LLAMA, ["layers.2.mixer.mask=[causal, {kind: window, size: 8}]"], "layers.2.mixer.mask", "all_of cannot"),
        (LLAMA, ["layers.*.mixer.sink=true"], "layers.0.mixer.sink", "True cannot"),
        (LLAMA, ["layers.0.ffn=mlp"], "layers.0.ffn", "mlp cannot be written as llama"),
        (LLAMA, ["layers.*.ffn=null"], "layers.0.ffn", "nothing cannot be written as llama"),
        (LLAMA, ["layers.*.wire=sandwich_norm"], "layers.0.wire", "sandwich_norm cannot"),
        (LLAMA, ["layers.*.mixer.bias=true"], "layers.0.mixer.out_bias", "False cannot"),
        (LLAMA, ["layers.*.mixer.position.scaling=ntk"], "layers.0.mixer.position.scaling", "ntk cannot"),
        (LLAMA, ["layers.*.mixer.position.pairs=adjacent"], "layers.0.mixer.position.pairs", "adjacent cannot"),
        (LLAMA, ["norm.eps=0.1"], "layers.0.norm.eps", "1e-05 cannot be written as llama (there it is 0.1)"),
        (
            LLAMA,
            ["layers.*.mixer.heads=6"],
            "layers.0.mixer.heads",
            "6 cannot be written as llama (it must divide the width, 28)",
        ),
        (LLAMA, ["head.softcap=30.0"], "head.softcap", "30.0 cannot"),
        (GPT2, ["position.offset=2"], "position.offset", "2 cannot be written as gpt2"),
        (GPT2, ["layers.*.mixer.kv_heads=2"], "layers.0.mixer.kv_heads", "2 cannot be written as gpt2"),
        (GPT2, ["layers.*.mixer.head=12"], "layers.0.mixer.head", "12 cannot be written as gpt2"),
        (GPT2, ["layers.*.mixer.scale=0.3"], "layers.0.mixer.scale", "0.3 cannot be written as gpt2"),
    ],
)
def test_what_cannot_be_written_is_named(spec: Model, sets: list[str], path: str, said: str) -> None:
    spec = changed(spec, sets)
    with pytest.raises(SpecError) as refused:
        to_hf(spec, "llama" if spec.layers[0].norm.kind == "rmsnorm" else "gpt2")
    assert refused.value.path == path
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 4096}, "config.sliding_window"),
        ({"model_type": "rwkv9"}, "config.model_type: 'rwkv9' is not a known family"),
        ({"model_type": ["llama"]}, "config.model_type"),
        ({"hidden_act": "mish"}, "config.hidden_act: 'mish' is unsupported"),
        ({"hidden_act": {}}, "config.hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "config.rope_parameters.mscale"),
        ({"rope_scaling": {"type": "su"}}, "config.rope_parameters.rope_type: 'su' is unsupported"),
        ({"rope_scaling": 3}, "config.rope_scaling: 3 is not a mapping"),
        ({"num_hidden_layers": 10**9}, "config.num_hidden_layers"),
        ({"hidden_size": None}, "config.hidden_size: is missing"),
        ({"hidden_size": "4096"}, "config.hidden_size: '4096' is not a whole number"),
        ({"num_key_value_heads": 5}, "layers.0.mixer.kv_heads: 5 does not divide 32"),
        ({"pretraining_tp": 4}, "config.pretraining_tp: 4 is unsupported"),
    ],
)
def test_what_is_not_known_in_a_config_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_hf({**LLAMA_31_8B, **change})
    assert said in str(refused.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from(sorted(LLAMA_31_8B)), value=PLAIN)
def test_any_value_is_read_or_refused(field: str, value: Any) -> None:
    try:
        spec = from_hf({**LLAMA_31_8B, "num_hidden_layers": 2, field: value})
    except DovetailError:
        return
    assert isinstance(spec, Model)


def ours(spec: Model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in build(spec).named_parameters()}


def test_tensors_that_do_not_fit_are_named() -> None:
    theirs = export_tensors(GPT2, ours(GPT2))
    name = "transformer.h.1.attn.c_attn.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in theirs.items() if k != name}, f"{name}: is missing"),
        ({**theirs, "score.weight": torch.ones(2)}, "score.weight: has no place"),
        ({**theirs, name: theirs[name].T}, f"{name}: has shape (84, 28)"),
        ({**theirs, name: torch.ones(())}, f"{name}: has shape ()"),
        ({**theirs, "lm_head.weight": torch.zeros(62, 28)}, "lm_head.weight: is tied"),
    ]
    for tensors, said in cases:
        with pytest.raises(FileError) as refused:
            import_tensors(GPT2, tensors)
        assert said in str(refused.value)


def test_buffers_of_old_files_are_passed_over() -> None:
    mine = ours(GPT2)
    theirs = export_tensors(GPT2, mine)
    stale = {"transformer.h.0.attn.bias": torch.ones(1, 1, 40, 40), "lm_head.weight": theirs["transformer.wte.weight"].clone()}
    with pytest.warns(DroppedTensors, match=r"attn\.bias: 1 tensor, 6,400 bytes, not imported \(the causal mask\)"):
        again = import_tensors(GPT2, {**theirs, **stale})
    assert again.keys() == mine.keys()
    assert all(again[name].equal(mine[name]) for name in mine)


def test_our_own_tensors_must_fit_too() -> None:
    mine = ours(LLAMA)
    with pytest.raises(FileError, match="is missing"):
        export_tensors(LLAMA, {k: v for k, v in mine.items() if k != "norm.scale"})
    with pytest.raises(FileError, match="is not a tensor of this spec"):
        export_tensors(LLAMA, {**mine, "bogus": torch.ones(1)})


def test_the_port_needs_no_transformers() -> None:
    for file in Path(dovetail.hf.__file__).parent.rglob("*.py"):
        assert "import transformers" not in file.read_text()
        assert "from transformers" not in file.read_text()


@pytest.mark.parametrize("name", ["llama-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-tiny", "gpt2", "gpt2-tiny"])
def test_presets_of_the_two_families_can_be_written(name: str) -> None:
    assert expressible(load_spec(name)) == name.partition("-")[0]


@pytest.mark.parametrize("family", ["granite", "granitemoe"])
def test_granite_writes_the_default_scale_as_a_number(family: str) -> None:
    """transformers multiplies by attention_multiplier, which may not be null."""
    text = "{width: 24, vocab: 62, layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2}, ffn: {kind: FFN}}]}"
    spec = from_yaml(text.replace("FFN", "glu, hidden: 36" if family != "granitemoe" else "moe, hidden: 12, experts: 4"))
    config = to_hf(spec, family).config
    assert config["attention_multiplier"] == 6**-0.5
    assert from_hf(config).layers[0].mixer.scale is None
