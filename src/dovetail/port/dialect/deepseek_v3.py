"""DeepSeek-V3: mla attention, dense layers first, then experts in groups, balanced by a bias (DeepSeek-AI 2024)."""

from __future__ import annotations

from dovetail.port import mla
from dovetail.port.dialect.llama import LLAMA, NORM
from dovetail.port.expert import FirstDense, Groups, Shared, bank, glu
from dovetail.port.table import ACTIVATIONS, INV_FREQ, Named, Only, Row, Same, Skip

EXPERTS, PLAIN, LAYER = "layers.*.ffn:moe", "layers.*.ffn:glu", "layers.{}"
ROUTER = f"{EXPERTS}.router"
OLDER = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

DEEPSEEK_V3 = LLAMA.but(
    "deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer={
        "mixer": {"kind": "mla", "norm": NORM, "position": {"kind": "rope", "pairs": "adjacent"}},
        "ffn": {
            "kind": "moe",
            "router": {"kind": "sigmoid_router", "balance_bias": True, "scale": 2.5},
            "shared": {"kind": "glu"},
        },
    },
    without=("mlp_bias",),
    fields=(
        *mla.fields(),
        FirstDense("first_k_dense_replace", "num_hidden_layers", 3),
        Groups(ROUTER),
        Same("n_routed_experts", f"{EXPERTS}.experts"),
        Same("num_experts_per_tok", f"{ROUTER}.top_k"),
        Same("norm_topk_prob", f"{ROUTER}.normalize"),
        Same("routed_scaling_factor", f"{ROUTER}.scale"),
        Same("moe_intermediate_size", f"{EXPERTS}.hidden"),
        Shared("n_shared_experts", "moe_intermediate_size", f"{EXPERTS}.shared.hidden", f"{EXPERTS}.hidden"),
        Same("intermediate_size", f"{PLAIN}.hidden"),
        Named("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{EXPERTS}.shared.act",)),
        *(Only(name, value) for name, value in OLDER.items()),
    ),
    tensors=(
        *mla.tensors(f"{LAYER}.self_attn", f"{LAYER}.mixer"),
        Row(f"{LAYER}.mlp.gate.weight", f"{LAYER}.ffn.router.weight"),
        Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{LAYER}.ffn.router.balance"),
        *bank(f"{LAYER}.mlp.experts.{{expert}}", f"{LAYER}.ffn.bank"),
        *glu(f"{LAYER}.mlp.shared_experts", f"{LAYER}.ffn.shared"),
    ),
    fixed={"attention_bias": False},
    ignored=("ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits", "qk_head_dim"),
    skips=(
        INV_FREQ,
        Skip("model.layers.{layers}.*", "a layer for multi-token prediction", marker="model.layers.{layers}.eh_proj.weight"),
    ),
    reset={"num_nextn_predict_layers": 0},
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    limits=(),
)
