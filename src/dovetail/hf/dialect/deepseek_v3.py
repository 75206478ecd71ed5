"""DeepSeek-V3: MLA, dense layers first, then grouped experts balanced by a bias, multi-token prediction (DeepSeek-AI 2024)."""

from __future__ import annotations

from dovetail.hf import mla
from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.expert import ExpertGroups, FirstDense, SharedExperts, expert_rows, glu_rows
from dovetail.hf.field import ACTIVATIONS, Choice, Copy, LegacyFixed
from dovetail.hf.table import Ahead, Row, ahead_rows

EXPERTS, PLAIN, LAYER = "layers.*.ffn:moe", "layers.*.ffn:glu", "layers.{}"
ROUTER = f"{EXPERTS}.router"
OLDER = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

BACKBONE = LLAMA.variant(
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
        ExpertGroups(ROUTER),
        Copy("n_routed_experts", f"{EXPERTS}.experts"),
        Copy("num_experts_per_tok", f"{ROUTER}.top_k"),
        Copy("norm_topk_prob", f"{ROUTER}.normalize"),
        Copy("routed_scaling_factor", f"{ROUTER}.scale"),
        Copy("moe_intermediate_size", f"{EXPERTS}.hidden"),
        SharedExperts("n_shared_experts", "moe_intermediate_size", f"{EXPERTS}.shared.hidden", f"{EXPERTS}.hidden"),
        Copy("intermediate_size", f"{PLAIN}.hidden"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{EXPERTS}.shared.act",)),
        *(LegacyFixed(name, value) for name, value in OLDER.items()),
    ),
    tensors=(
        *mla.tensors(f"{LAYER}.self_attn", f"{LAYER}.mixer"),
        Row(f"{LAYER}.mlp.gate.weight", f"{LAYER}.ffn.router.out.weight"),
        Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{LAYER}.ffn.router.balance"),
        *expert_rows(f"{LAYER}.mlp.experts.{{expert}}", f"{LAYER}.ffn.bank"),
        *glu_rows(f"{LAYER}.mlp.shared_experts", f"{LAYER}.ffn.shared"),
    ),
    fixed={"attention_bias": False},
    ignored=("ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits", "qk_head_dim"),
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

# a depth of multi-token prediction is the layer after the last one, and has the embedding and the head once more
NEXT = "layers.{after}"
DEEPSEEK_V3 = BACKBONE.variant(
    "deepseek_v3",
    tensors=ahead_rows(
        BACKBONE.tensors,
        NEXT,
        (f"{NEXT}.enorm.weight", "embed_norm.scale"),
        (f"{NEXT}.hnorm.weight", "hidden_norm.scale"),
        (f"{NEXT}.eh_proj.weight", "proj.weight"),
        (f"{NEXT}.shared_head.norm.weight", "norm.scale"),
    ),
    ahead=Ahead(
        count="num_nextn_predict_layers",
        marker=f"model.{NEXT}.eh_proj.weight",
        default=1,
        copies={f"model.{NEXT}.embed_tokens.weight": "embed.table", f"model.{NEXT}.shared_head.head.weight": "head.out.weight"},
    ),
)
