"""Random configs of tiny decoders, continued: families that differ from the first ones by little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draws import PLAIN, SHORT, USUAL, Draw, called, gptj, layer_types, llama_like, older, rope, some

Fields = dict[str, Any]


def arcee(draw: Draw) -> Fields:
    return llama_like(draw, attention_bias=some(draw), mlp_bias=some(draw))


def seed_oss(draw: Draw) -> Fields:
    biases = {"attention_bias": some(draw), "attention_out_bias": some(draw), "mlp_bias": some(draw)}
    return llama_like(draw, residual_dropout=0.2, **biases)


def helium(draw: Draw) -> Fields:
    made = llama_like(draw, head=False, attention_bias=some(draw), mlp_bias=some(draw))
    return {**made, "head_dim": made["hidden_size"] // made["num_attention_heads"]}


def glm(draw: Draw) -> Fields:
    made = llama_like(draw, attention_bias=some(draw), head_dim=draw.choice([8, 12]))
    return {**made, "rope_parameters": rope(draw, partial_rotary_factor=draw.choice([1.0, 0.5]))}


def ernie4_5(draw: Draw) -> Fields:
    return llama_like(draw, use_bias=some(draw))


def cohere(draw: Draw) -> Fields:
    made = llama_like(draw, head=False, attention_bias=some(draw), logit_scale=draw.choice([1.0, 0.3]))
    made["layer_norm_eps"] = made.pop("rms_norm_eps")
    return made


def cohere2(draw: Draw) -> Fields:
    return {**cohere(draw), "num_hidden_layers": 3, "sliding_window": 5, "layer_types": layer_types(draw, 3)}


def exaone4(draw: Draw) -> Fields:
    window = draw.choice([None, 5])
    types = ["full_attention"] * 3 if window is None else ["sliding_attention", *layer_types(draw, 2)]
    return llama_like(draw, num_hidden_layers=3, sliding_window=window, layer_types=types, sliding_window_pattern=4)


def olmo3(draw: Draw) -> Fields:
    made = llama_like(draw, head=False, attention_bias=some(draw), num_hidden_layers=3, layer_types=layer_types(draw, 3))
    return {**made, "sliding_window": 5, "rope_parameters": {"full_attention": rope(draw), "sliding_attention": PLAIN}}


def ministral(draw: Draw) -> Fields:
    return llama_like(draw, num_hidden_layers=3, sliding_window=5, layer_types=layer_types(draw, 3))


def olmoe(draw: Draw) -> Fields:
    experts = {"num_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 4]), "norm_topk_prob": some(draw)}
    return llama_like(draw, head=False, attention_bias=some(draw), **experts)


def phi(draw: Draw) -> Fields:
    made = llama_like(draw, head=False, qk_layernorm=some(draw))
    made["layer_norm_eps"] = made.pop("rms_norm_eps")
    made["hidden_act"] = draw.choice(["gelu_new", "gelu", "relu"])
    share = {"partial_rotary_factor": draw.choice([1.0, 0.5])}
    return {**made, "hidden_size": 8 * made["num_attention_heads"], "rope_parameters": rope(draw, **share)}


def persimmon(draw: Draw) -> Fields:
    made = older(draw, intermediate_size=44, qk_layernorm=some(draw), hidden_act=draw.choice(["relu2", "gelu"]))
    made["width"] = 8 * made["heads"]
    return {**called(made, **USUAL), "rope_parameters": rope(draw, partial_rotary_factor=draw.choice([1.0, 0.5]))}


def codegen(draw: Draw) -> Fields:
    return {**gptj(draw), "n_head": 4, "n_embd": draw.choice([24, 32])}


def gpt_bigcode(draw: Draw) -> Fields:
    made = older(draw, n_inner=draw.choice([None, 44]), n_positions=96, scale_attn_weights=some(draw), multi_query=some(draw))
    return {**called(made, **SHORT), "activation_function": draw.choice(["gelu_pytorch_tanh", "gelu", "relu"])}


def granitemoe(draw: Draw) -> Fields:
    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    experts = {"num_local_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 4])}
    return llama_like(draw, head=False, attention_bias=some(draw), **scales, **experts)


def granitemoeshared(draw: Draw) -> Fields:
    return {**granitemoe(draw), "shared_intermediate_size": draw.choice([0, 20])}


def granitemoehybrid(draw: Draw) -> Fields:
    made = granitemoe(draw)
    if some(draw):
        made["num_local_experts"] = 0
    made["layer_types"] = draw.sample(["linear_attention", "full_attention", "linear_attention"], 3)
    width = 2 * made["num_attention_heads"] * draw.choice([2, 4])
    heads = draw.choice([count for count in (4, 6) if 2 * width % count == 0])
    sizes = {"mamba_n_heads": heads, "mamba_d_state": 5, "mamba_n_groups": draw.choice([1, 2]), "mamba_d_conv": 3}
    made |= {"num_hidden_layers": 3, "hidden_size": width, "mamba_d_head": 2 * width // heads, **sizes}
    made["hidden_act"] = "silu"
    return {**made, "shared_intermediate_size": 20, "position_embedding_type": draw.choice([None, "rope"])}


def nemotron(draw: Draw) -> Fields:
    made = llama_like(draw, attention_bias=some(draw), mlp_bias=some(draw), head_dim=draw.choice([8, 12]))
    made["norm_eps"] = made.pop("rms_norm_eps")
    return {**made, "rope_parameters": rope(draw, partial_rotary_factor=draw.choice([1.0, 0.5]))}


def hunyuan_v1_dense(draw: Draw) -> Fields:
    return llama_like(draw, attention_bias=some(draw))


def xglm(draw: Draw) -> Fields:
    made = older(draw, ffn_dim=44, activation_function=draw.choice(["gelu", "relu"]), scale_embedding=some(draw))
    return called(made, heads="attention_heads", width="d_model", layers="num_layers")


def biogpt(draw: Draw) -> Fields:
    made = older(draw, intermediate_size=44, hidden_act=draw.choice(["gelu", "relu"]), scale_embedding=some(draw))
    return {**called(made, **USUAL), "max_position_embeddings": 96, "layer_norm_eps": draw.choice([1e-12, 1e-2])}


def qwen2_moe(draw: Draw) -> Fields:
    made = llama_like(draw, head=False, num_hidden_layers=3, use_sliding_window=True, sliding_window=5, qkv_bias=some(draw))
    made |= {"num_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 4]), "norm_topk_prob": some(draw)}
    made |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 22, "layer_types": layer_types(draw, 3)}
    return {**made, **draw.choice([{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {}])}


def gpt_neo(draw: Draw) -> Fields:
    made = called(older(draw, window_size=5), heads="num_heads", width="hidden_size", layers="num_layers")
    types = [draw.choice(["global", "local"]) for _ in range(made["num_layers"])]
    made |= {"attention_types": [[types, 1]], "intermediate_size": draw.choice([None, 44]), "max_position_embeddings": 96}
    return {**made, "activation_function": draw.choice(["gelu_new", "relu"])}


def falcon_h1(draw: Draw) -> Fields:
    made = llama_like(draw, attention_bias=some(draw), mlp_bias=some(draw), hidden_act="silu")
    heads, groups = draw.choice([(6, 2), (4, 1), (6, 3), (4, 2)])
    made |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": 5, "mamba_d_conv": draw.choice([3, 4])}
    made |= draw.choice([{"mamba_d_ssm": 9 * heads}, {"mamba_d_ssm": None, "mamba_expand": heads, "mamba_d_head": "auto"}])
    made |= {"mamba_conv_bias": some(draw), "mamba_rms_norm": some(draw), "mamba_norm_before_gate": some(draw)}
    names = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    made |= {f"{name}_multiplier": draw.choice([1.0, 0.3, 1.7]) for name in names}
    made["ssm_multipliers"] = draw.choice([None, [0.5, 1.4, 0.7, 1.3, 0.9]])
    return {**made, "mlp_multipliers": draw.choice([None, [0.8, 1.3]])}


def nemotron_h(draw: Draw) -> Fields:
    groups, shared = draw.choice([(1, 6), (2, 3), (2, 2)])
    made: Fields = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    made |= {"hidden_size": draw.choice([24, 28]), "vocab_size": draw.choice([59, 71]), "head_dim": 10, "intermediate_size": 44}
    made |= {
        "num_attention_heads": groups * shared,
        "num_key_value_heads": groups,
        "mlp_bias": some(draw),
        "intermediate_size": 44,
    }
    heads, groups = draw.choice([(6, 2), (4, 1), (6, 3), (4, 2)])
    made |= {"mamba_num_heads": heads, "n_groups": groups, "mamba_head_dim": 7, "ssm_state_size": 5, "time_step_min": 1e-12}
    made |= {"conv_kernel": draw.choice([3, 4]), "use_conv_bias": some(draw), "layer_norm_epsilon": draw.choice([1e-5, 1e-2])}
    groups, best = draw.choice([(4, 2), (2, 1), (1, 1)])
    made |= {"n_routed_experts": 8, "n_group": groups, "topk_group": best, "num_experts_per_tok": draw.choice([1, 2, 3])}
    made |= {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 22, "norm_topk_prob": some(draw)}
    made |= {"moe_latent_size": None if made["mlp_bias"] else draw.choice([None, 16]), "routed_scaling_factor": 2.5}
    types = ["linear_attention", "full_attention", "moe", "mlp", draw.choice(["linear_attention", "moe"])]
    return {**made, "mlp_hidden_act": draw.choice(["relu2", "silu"]), "layers_block_type": draw.sample(types, 5)}


def gemma4_text(draw: Draw) -> Fields:
    made = llama_like(draw, sliding_window=5, attention_bias=some(draw))
    made["hidden_activation"] = made.pop("hidden_act")
    heads, sharing = made["num_attention_heads"], draw.choice([0, 1, 2])
    share = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]), "rope_theta": 700.0}
    ropes = {"full_attention": draw.choice([share, share, rope(draw)]), "sliding_attention": PLAIN}
    groups = draw.choice([None, *(n for n in (1, 2, 3) if heads % n == 0)])
    full = {"global_head_dim": draw.choice([12, 16]), "num_global_key_value_heads": groups}
    own = draw.sample(["sliding_attention", "full_attention"], 2) if sharing else layer_types(draw, 2)
    types = [*own, *layer_types(draw, max(sharing - 1, 0)), "full_attention"]  # each type has keys and values to share
    made |= {**full, "attention_k_eq_v": some(draw), "layer_types": types, "rope_parameters": ropes}
    made["num_hidden_layers"] = len(types)
    made |= {"num_kv_shared_layers": sharing, "use_double_wide_mlp": some(draw), "enable_moe_block": some(draw)}
    made |= {"num_experts": draw.choice([4, 6]), "top_k_experts": draw.choice([1, 2, 4]), "moe_intermediate_size": 20}
    made |= {"hidden_size_per_layer_input": draw.choice([0, 5, 6]), "vocab_size_per_layer_input": made["vocab_size"]}
    return {**made, "final_logit_softcapping": draw.choice([None, 2.0])}


MORE: dict[str, Callable[[Draw], Fields]] = {
    "glm4": glm,
    **{
        maker.__name__: maker
        for maker in (
            arcee,
            seed_oss,
            helium,
            glm,
            ernie4_5,
            cohere,
            cohere2,
            exaone4,
            olmo3,
            ministral,
            olmoe,
            phi,
            persimmon,
            codegen,
            gpt_bigcode,
            granitemoe,
            granitemoeshared,
            granitemoehybrid,
            nemotron,
            hunyuan_v1_dense,
            xglm,
            biogpt,
            qwen2_moe,
            gpt_neo,
            falcon_h1,
            nemotron_h,
            gemma4_text,
        )
    },
}
