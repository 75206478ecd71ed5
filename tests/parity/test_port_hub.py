"""Configs of experts and recurrences as they lie on the hub: what they cost is what is known of them."""

from __future__ import annotations

from typing import Any

import pytest
from expressible import expressible
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import DovetailError, SpecError
from dovetail.files.spec import load_spec
from dovetail.hf.hf import from_hf, to_hf
from dovetail.hf.resolved import explicit
from dovetail.model.model import Model
from dovetail.spec.fold import parameters

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}
MAMBA_130M = {
    "architectures": ["MambaForCausalLM"],
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "hidden_size": 768,
    "initializer_range": 0.1,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "num_hidden_layers": 24,
    "residual_in_fp32": True,
    "state_size": 16,
    "time_step_rank": 48,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
# numbers in all, as their authors and the hub count them; what predicts beyond the next token is not among them
KNOWN: dict[str, tuple[dict[str, Any], int]] = {
    "mixtral": (MIXTRAL_8X7B, 46_702_792_704),
    "qwen3_moe": (QWEN3_30B_A3B, 30_532_122_624),
    "deepseek_v3": (DEEPSEEK_V3, 682_636_472_320),
    "gpt_oss": (GPT_OSS_20B, 20_914_757_184),
    "qwen3_next": (QWEN3_NEXT_80B, 79_674_391_296),
    "jamba": (JAMBA, 51_570_323_328),
    "mamba": (MAMBA_130M, 129_135_360),
}


@pytest.mark.parametrize("family", KNOWN)
def test_configs_of_the_hub_are_read(family: str) -> None:
    config, numbers = KNOWN[family]
    spec = from_hf(config)
    assert parameters(spec) == numbers
    assert explicit(from_hf(to_hf(spec, family).config)) == explicit(spec)


@pytest.mark.parametrize(
    ("preset", "family"),
    [
        ("mixtral-8x7b", "mixtral"),
        ("mixtral-tiny", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("qwen3-moe-tiny", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("deepseek-tiny", "deepseek_v3"),
        ("mamba-130m", "mamba"),
        ("mamba-tiny", "mamba"),
        ("mamba2-130m", "mamba2"),
        ("mamba2-tiny", "mamba2"),
        ("jamba-tiny", "jamba"),
        ("gated-deltanet-hybrid-tiny", "qwen3_next"),
    ],
)
def test_presets_can_be_written(preset: str, family: str) -> None:
    assert expressible(load_spec(preset)) == family


def test_scores_are_sharpened_as_yarn_of_deepseek_asks() -> None:
    """0.1·ln 40 + 1 = 1.3688879…, squared and over √192 is 0.1352337…; cos and sin keep their size: both words are equal."""
    mixer = from_hf(DEEPSEEK_V3).layers[0].mixer
    assert mixer.scale == pytest.approx(0.13523377, abs=1e-8)  # type: ignore[attr-defined]
    assert mixer.position.scaling.attention == 1.0  # type: ignore[attr-defined]
    assert "mscale_all_dim" in to_hf(from_hf(DEEPSEEK_V3), "deepseek_v3").config["rope_parameters"]


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "config.router_jitter_noise: 0.1 is unsupported"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "config.mlp_only_layers: 3 is not a list"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "config.decoder_sparse_step: 0 is not a whole number from 1 on"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "config.scoring_func: 'softmax' is unsupported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "config.topk_method: 'greedy' is unsupported"),
        ("deepseek_v3", {"attention_bias": True}, "config.attention_bias: True is unsupported"),
        ("deepseek_v3", {"num_key_value_heads": 64}, "config.num_key_value_heads: 64 is unsupported"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": "40", "mscale": 1}}, "config.rope_scaling: '40' is not"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "config.swiglu_alpha: 1.0 is unsupported"),
        ("gpt_oss", {"experts_per_token": 2}, "config.experts_per_token: 2 is unsupported"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "config.layer_types: is not a list of 48 words"),
        ("qwen3_next", {"hidden_act": "gelu"}, "config.hidden_act: 'gelu' is unsupported"),
        ("jamba", {"attn_layer_offset": 8}, "config.attn_layer_offset: 8 is not below the period, 8"),
        ("jamba", {"mamba_inner_layernorms": False}, "config.mamba_inner_layernorms: False is unsupported"),
        ("mamba", {"intermediate_size": 1000}, "config.intermediate_size: 1000 is unsupported"),
    ],
)
def test_what_is_not_known_in_a_config_is_named(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_hf({**KNOWN[family][0], **change})
    assert said in str(refused.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(family=st.sampled_from(sorted(KNOWN)), data=st.data(), value=PLAIN)
def test_any_value_is_read_or_refused(family: str, data: st.DataObject, value: Any) -> None:
    config = {**KNOWN[family][0], "num_hidden_layers": 3}
    config.pop("layer_types", None)
    field = data.draw(st.sampled_from(sorted(config)))
    try:
        spec = from_hf({**config, field: value})
    except DovetailError:
        return
    assert isinstance(spec, Model)
