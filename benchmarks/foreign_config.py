"""Tiny configs for `foreign.py`: the default config of a class, with every size made small by what the size is called."""

from __future__ import annotations

import re
from typing import Any

WIDTH, HEADS = 48, 4
# what a size is called, and how small it is made; the first that fits counts
SMALL: tuple[tuple[str, int], ...] = (
    (r"vocab_size_per_layer_input|(.*_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings|vocab", 62),
    (r"max_position_embeddings|n_positions|n_ctx|seq_length|max_seq_len|max_sequence_length|context_length", 64),
    (r"num_(hidden_)?layers|n_layers?|num_decoder_layers|decoder_layers|encoder_layers|num_blocks", 2),
    (r"num_(key_value|kv)_heads|(.*_)?num_key_value_heads|n_head_kv|num_kv_heads|kv_heads", 2),
    (r"(num_)?(decoder_|encoder_)?attention_heads|num_attention_heads|n_heads?|num_heads|num_decoder_attention_heads", HEADS),
    (r"num_encoder_attention_heads|swa_num_attention_heads|(linear|swa)_?num_heads", HEADS),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"hidden_size|d_model|n_embd|dim|word_embed_proj_dim|embedding_size|embed_dim|attention_hidden_size|emb_dim", WIDTH),
    (r"hidden_size_per_layer_input|per_layer_.*|laurel_rank", 8),
    (r"moe_intermediate_size|(shared_)?expert_.*intermediate_size|expert_ffn_hidden_size|shared_expert_intermediate_size", 20),
    (r"(.*_)?intermediate_size(_mlp)?|((decoder|encoder)_)?ffn_dim|ffn_hidden_size|n_inner|d_ff|feed_forward_.*size|dff", 40),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_lora_rank|.*_rank", 10),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"qk_head_dim", 12),
    (r"qk_nope_head_dim|v_head_dim|index_head_dim", 8),
    (r"index_topk", 16),
    (r"(linear_)?(num_)?(key|value)_heads|linear_num_(key|value)_heads", HEADS),
    (r"(.*_)?head_dim|head_size|attention_head_size|kv_channels|d_kv|d_head|mamba_d_head", 12),
    (r"num_experts_per_(tok|token)|top_?k|moe_top_?k|num_selected_experts|top_k_experts|num_experts_per_token|moe_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"(moe_)?(num|n)_shared_experts", 1),
    (r"sliding_window(_size)?|attention_window_size|local_attention|attention_chunk_size|window_size|local_window_size", 7),
    (r"chunk_size|mamba_chunk_size|mamba_chunk_len|scan_chunk_size", 8),
    (r"state_size|ssm_state_size|mamba_d_state|mamba_state_size", 6),
    (r"first_k_dense_replace|num_dense_layers|num_hash_layers|num_kv_shared_layers", 1),
    (r"lru_width|conv_dim", WIDTH),
    (r"_?sliding_window_pattern|layer_group_size|full_attention_interval|layer_types_pattern", 2),
    (r"mamba_d_ssm", 2 * WIDTH),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# two layers that share one attention
SHARED = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * WIDTH // HEADS,
    "num_key_value_heads": HEADS,
}
SECTIONS = ROPE | {"mrope_section": [2, 2, 2]}
# what one class needs beside its sizes, by its model type
OWN: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 32), "local_attn_chunk_length": 4, "is_decoder": True,
                 "attn_layers": ["local", "local"], "hidden_size": WIDTH, "attention_head_size": 12},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": HEADS, "num_attention_heads": HEADS, "topk_method": "greedy"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 12},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 12},
    "ministral": {"rope_parameters": ROPE, "head_dim": 12},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "stablelm": {"head_dim": 12, "partial_rotary_factor": 0.5},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "nemotron": {"head_dim": 12, "num_key_value_heads": 2},
    "xlm": {"causal": True},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 2, "expand": 2},
    "xlstm": {"num_heads": 4, "embedding_dim": 128, "hidden_size": 128, "qk_dim_factor": 0.5, "chunk_size": 16},
    "rwkv": {"attention_hidden_size": WIDTH, "context_length": 64},
    "xlnet": {"mem_len": 32, "attn_type": "uni"},  # the other type reads a text in both directions
    "cpmant": {"pad_token_id": 0},  # its forward knows padding by this id
    "dbrx": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "zamba": SHARED,
    "zamba2": SHARED,
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"sliding_attention": SECTIONS, "full_attention": SECTIONS}},
    "qwen4_exp": {"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": HEADS, "indexer_kv_heads": 1,
                  "indexer_head_dim": 12, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "deepseek_v4": {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
                    "mlp_layer_types": ["hash_moe", "moe"]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "hidden_size_global": WIDTH, "num_hidden_layers": 2},
}  # fmt: skip


def small(name: str, value: Any) -> int | None:
    """How small a field of a config is made; None where it is no size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return None
    for pattern, size in SMALL:
        if re.fullmatch(pattern, name):
            return size
    return None


def shrunk(config_class: Any, kind: str, variant: int, *, causal: bool = True) -> Any:
    """A config of this class with every size small. Variants are tried in turn until one can be built."""
    first = config_class()
    words: dict[str, Any] = {}
    for name, value in vars(first).items():
        plain = name.lstrip("_")
        if plain in getattr(first, "sub_configs", {}) and value is not None:
            words[plain] = shrunk(type(value), kind, variant, causal=causal)
        elif (size := small(plain, value)) is not None:
            words[plain] = size
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and plain.endswith(("dropout", "_pdrop")):
            words[plain] = value * 0
    taken = set(vars(first)) | set(getattr(config_class, "attribute_map", {}).values())
    words |= {name: id for name, id in SPECIAL.items() if name in taken or name in vars(first)}
    if causal and ("is_decoder" in taken or variant == 3):
        words["is_decoder"] = True
    if "qk_rope_head_dim" in words:  # latent attention: what others call head_dim is what of a key turns
        words |= {"head_dim": words["qk_rope_head_dim"]} if "head_dim" in words else {}
    if variant in (1, 3):  # heads that divide the width, as many for keys
        words |= {name: WIDTH // HEADS for name in words if name == "head_dim" and "qk_rope_head_dim" not in words}
        words |= {name: HEADS for name in words if "key_value" in name or name == "num_kv_heads"}
    if variant == 2:  # patterns of layers that are longer than two
        words |= {name: 4 for name in words if re.fullmatch(SMALL[2][0], name)}
    counts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }  # where a default is left to the checkpoint
    words |= {name: count for name, count in counts.items() if getattr(first, name, 0) is None}
    words |= OWN.get(kind, {})
    words |= {} if causal else {name: False for name in ("is_decoder", "causal") if name in words or name in taken}
    config = config_class(**words)
    config._experts_implementation = "eager"  # their grouped kernel knows no float64
    return config
