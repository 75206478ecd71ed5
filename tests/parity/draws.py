"""Random configs of tiny decoders, one function per family; sizes are all different."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Draw = random.Random
ORIGINAL = "original_max_position_embeddings"
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 0.5,
        "high_freq_factor": 3.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 4.0, "beta_slow": 0.3},
)


PLAIN = {"rope_type": "default", "rope_theta": 300.0}


def rope(draw: Draw, **more: Any) -> dict[str, Any]:
    return {**draw.choice(ROPES), "rope_theta": draw.choice([10000.0, 500.0]), **more}


def llama_like(draw: Draw, *, head: bool = True, **more: Any) -> dict[str, Any]:
    """Sizes all different; `head`: whether the size of a head is a field of its own."""
    groups, shared = draw.choice([(1, 6), (2, 3), (3, 2), (2, 2)])
    heads = groups * shared
    own = {"head_dim": draw.choice([6, 8, 10, 14])} if head else {}
    return {
        "hidden_size": heads * (draw.choice([4, 5, 7]) if head else draw.choice([4, 6, 10])),
        "intermediate_size": draw.choice([37, 44, 52]),
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": draw.choice([59, 62, 71]),
        "max_position_embeddings": 96,
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "hidden_act": draw.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
        "tie_word_embeddings": draw.random() < 0.5,
        **{f"{name}_token_id": None for name in ("pad", "bos", "eos")},
        "rope_parameters": rope(draw),
        **own,
        **more,
    }


def some(draw: Draw) -> bool:
    return draw.random() < 0.5


def layer_types(draw: Draw, count: int) -> list[str]:
    return [draw.choice(["sliding_attention", "full_attention"]) for _ in range(count)]


def llama(draw: Draw) -> dict[str, Any]:
    return llama_like(draw, attention_bias=some(draw), mlp_bias=some(draw))


def gpt2(draw: Draw) -> dict[str, Any]:
    made = older(draw, n_inner=draw.choice([None, 44]), n_positions=96, scale_attn_weights=some(draw))
    return {**called(made, **SHORT), "activation_function": draw.choice(["gelu_new", "gelu", "relu"])}


def mistral(draw: Draw) -> dict[str, Any]:
    return llama_like(draw, sliding_window=draw.choice([None, 5, 7]))


def qwen2(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False, use_sliding_window=some(draw), sliding_window=5)
    return {**made, "max_window_layers": draw.choice([0, 1])}


def qwen3(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, attention_bias=some(draw), use_sliding_window=True, sliding_window=5)
    return {**made, "layer_types": layer_types(draw, made["num_hidden_layers"])}


def gemma(draw: Draw) -> dict[str, Any]:
    return llama_like(draw, attention_bias=some(draw))


def gemma2(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, query_pre_attn_scalar=draw.choice([8, 24]), sliding_window=5, attention_bias=some(draw))
    made["hidden_activation"] = made.pop("hidden_act")
    caps = {"attn_logit_softcapping": draw.choice([None, 3.0]), "final_logit_softcapping": draw.choice([None, 2.0])}
    return {**made, **caps, "layer_types": layer_types(draw, made["num_hidden_layers"])}


def phi3(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False, sliding_window=draw.choice([None, 5]))
    share = {"partial_rotary_factor": draw.choice([1.0, 0.5])}
    return {**made, "hidden_size": 4 * made["num_attention_heads"], "rope_parameters": {**PLAIN, **share}}


def olmo2(draw: Draw) -> dict[str, Any]:
    return llama_like(draw, head=False, attention_bias=some(draw))


def granite(draw: Draw) -> dict[str, Any]:
    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    return llama_like(draw, head=False, attention_bias=some(draw), mlp_bias=some(draw), **scales)


def starcoder2(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False, sliding_window=draw.choice([None, 5]), use_bias=some(draw))
    made["norm_epsilon"] = made.pop("rms_norm_eps")
    return made


def smollm3(draw: Draw) -> dict[str, Any]:
    made = llama_like(
        draw, head=False, attention_bias=some(draw), mlp_bias=some(draw), use_sliding_window=True, sliding_window=5
    )
    turning = [draw.choice([0, 1]) for _ in range(made["num_hidden_layers"] - 1)]
    return {**made, "no_rope_layers": [1, *turning], "layer_types": layer_types(draw, made["num_hidden_layers"])}


def gemma3_text(draw: Draw) -> dict[str, Any]:
    made = gemma2(draw)
    ropes = {"full_attention": rope(draw), "sliding_attention": PLAIN}
    return {**made, "rope_parameters": ropes, "attn_logit_softcapping": None}


def older(draw: Draw, **more: Any) -> dict[str, Any]:
    """Names of before Llama: full heads."""
    heads = draw.choice([3, 4, 6])
    sizes = {"vocab_size": draw.choice([59, 62, 71]), "tie_word_embeddings": some(draw)}
    tokens = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    return {"heads": heads, "width": 4 * heads * draw.choice([1, 2]), "layers": draw.choice([2, 3]), **sizes, **tokens, **more}


def called(made: dict[str, Any], **names: str) -> dict[str, Any]:
    """The same under the names of a family."""
    return {names.get(name, name): value for name, value in made.items()}


USUAL = {"heads": "num_attention_heads", "width": "hidden_size", "layers": "num_hidden_layers"}
SHORT = {"heads": "n_head", "width": "n_embd", "layers": "n_layer"}


def gpt_neox(draw: Draw) -> dict[str, Any]:
    made = older(draw, intermediate_size=44, use_parallel_residual=some(draw), attention_bias=some(draw))
    made["width"] = 8 * made["heads"]  # half a head is two pairs, which every scaling needs
    return {**called(made, **USUAL), "rope_parameters": rope(draw, partial_rotary_factor=draw.choice([1.0, 0.5]))}


def gptj(draw: Draw) -> dict[str, Any]:
    return called(older(draw, n_inner=44, rotary_dim=draw.choice([2, 4]), n_positions=96), **SHORT)


def opt(draw: Draw) -> dict[str, Any]:
    made = called(older(draw, ffn_dim=44, max_position_embeddings=96, enable_bias=some(draw)), **USUAL)
    return {**made, "word_embed_proj_dim": made["hidden_size"]}


def bloom(draw: Draw) -> dict[str, Any]:
    return called(older(draw), **{**SHORT, "width": "hidden_size"})


def mpt(draw: Draw) -> dict[str, Any]:
    return called(
        older(draw, attn_config={"softmax_scale": draw.choice([None, 0.3])}),
        heads="n_heads",
        width="d_model",
        layers="n_layers",
    )


def falcon(draw: Draw) -> dict[str, Any]:
    made = {**older(draw, bias=some(draw), ffn_hidden_size=44), "heads": 6, "width": 24}
    new = {"new_decoder_architecture": True, "num_kv_heads": draw.choice([1, 2, 3])}
    old = {"new_decoder_architecture": False, "multi_query": some(draw)}
    return {**called(made, **USUAL), **draw.choice([new, old]), "rope_parameters": rope(draw)}


def stablelm(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False, use_qkv_bias=some(draw), use_parallel_residual=some(draw))
    made["layer_norm_eps"] = made.pop("rms_norm_eps")
    share = {"partial_rotary_factor": draw.choice([1.0, 0.5])}
    return {**made, "hidden_size": 4 * made["num_attention_heads"], "rope_parameters": {**PLAIN, **share}}


def mixtral(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, sliding_window=draw.choice([None, 5, 7]), num_local_experts=draw.choice([4, 6]))
    return {**made, "num_experts_per_tok": draw.choice([1, 2, 4]), "router_aux_loss_coef": draw.choice([0.0, 0.02])}


def qwen3_moe(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, attention_bias=some(draw), use_sliding_window=some(draw), sliding_window=5)
    made["norm_topk_prob"] = some(draw)
    experts = {"num_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 4]), "moe_intermediate_size": 20}
    dense = draw.choice([{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {}])
    return {**made, **experts, **dense}


def deepseek_v3(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False)
    made["num_key_value_heads"] = made["num_attention_heads"]
    sizes = {"kv_lora_rank": 10, "q_lora_rank": draw.choice([None, 14]), "qk_nope_head_dim": 9, "qk_rope_head_dim": 12}
    groups, best = draw.choice([(4, 2), (2, 1), (1, 1), (2, 2)])
    experts = {"n_routed_experts": 8, "n_group": groups, "topk_group": best, "num_experts_per_tok": draw.choice([1, 2, 3])}
    experts |= {
        "moe_intermediate_size": 20,
        "n_shared_experts": draw.choice([1, 2]),
        "first_k_dense_replace": draw.choice([0, 1]),
    }
    experts |= {"norm_topk_prob": some(draw), "routed_scaling_factor": draw.choice([1.0, 2.5]), "rope_interleave": some(draw)}
    if made["rope_parameters"]["rope_type"] == "yarn":
        made["rope_parameters"] |= draw.choice(
            [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {}]
        )
    return {**made, **sizes, **experts, "v_head_dim": 7}


def gpt_oss(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, attention_bias=some(draw), sliding_window=5, swiglu_limit=draw.choice([7.0, 0.8]))
    made["layer_types"] = layer_types(draw, made["num_hidden_layers"])
    experts = {"num_local_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 4])}
    return {**made, **experts, "hidden_act": "silu"}


def space(draw: Draw, **more: Any) -> dict[str, Any]:
    made = called(older(draw, hidden_size=draw.choice([24, 28]), conv_kernel=draw.choice([3, 4])), layers="num_hidden_layers")
    del made["heads"], made["width"]
    eps = draw.choice([1e-5, 1e-2])
    return {**made, "state_size": draw.choice([5, 6]), "use_conv_bias": some(draw), "layer_norm_epsilon": eps, **more}


def mamba(draw: Draw) -> dict[str, Any]:
    return space(draw, expand=draw.choice([1, 2]), use_bias=some(draw), time_step_rank=draw.choice(["auto", 7]))


def mamba2(draw: Draw) -> dict[str, Any]:
    made = space(draw, expand=2, n_groups=draw.choice([1, 2]))
    head = made["hidden_size"] // 4
    return {**made, "head_dim": head, "num_heads": 8}


def qwen3_next(draw: Draw) -> dict[str, Any]:
    made = llama_like(
        draw, norm_topk_prob=some(draw), num_experts=draw.choice([4, 6]), num_experts_per_tok=draw.choice([1, 2, 4])
    )
    made |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 22, "num_hidden_layers": 3, "hidden_act": "silu"}
    made["rms_norm_eps"] = draw.choice([1e-3, 1e-2])  # a head that recalls next to nothing is mostly rounding, once normed
    made["rope_parameters"] = {**PLAIN, "partial_rotary_factor": draw.choice([1.0, 0.5])}
    kinds = ["linear_attention", "full_attention", draw.choice(["linear_attention", "full_attention"])]
    made["layer_types"] = draw.sample(kinds, 3)  # one of each: their cache wants an attention
    keys = draw.choice([1, 2, 4])
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 6}
    dense = draw.choice([{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {}])
    return {**made, **sizes, **dense, "head_dim": draw.choice([8, 12]), "linear_conv_kernel_dim": draw.choice([3, 4])}


def jamba(draw: Draw) -> dict[str, Any]:
    made = llama_like(draw, head=False, num_hidden_layers=draw.choice([3, 4]), hidden_act="silu")
    del made["rope_parameters"]
    attention, sparse = draw.choice([(2, 1), (3, 0), (2, 0)]), draw.choice([(2, 1), (1, 0), (3, 2)])
    made |= dict(zip(("attn_layer_period", "attn_layer_offset"), attention, strict=True))
    made |= dict(zip(("expert_layer_period", "expert_layer_offset"), sparse, strict=True))
    made |= {"mamba_d_state": 5, "mamba_d_conv": draw.choice([3, 4]), "mamba_expand": draw.choice([1, 2])}
    made |= {"mamba_dt_rank": draw.choice(["auto", 7]), "mamba_conv_bias": some(draw), "mamba_proj_bias": some(draw)}
    return {**made, "num_experts": draw.choice([1, 4]), "num_experts_per_tok": draw.choice([1, 2])}


FIRST: dict[str, Callable[[Draw], dict[str, Any]]] = {
    maker.__name__: maker
    for maker in (
        llama,
        gpt2,
        mistral,
        qwen2,
        qwen3,
        gemma,
        gemma2,
        gemma3_text,
        phi3,
        olmo2,
        granite,
        starcoder2,
        smollm3,
        stablelm,
        gpt_neox,
        gptj,
        opt,
        bloom,
        mpt,
        falcon,
        mixtral,
        mamba,
        mamba2,
        qwen3_moe,
        deepseek_v3,
        gpt_oss,
        qwen3_next,
        jamba,
    )
}
