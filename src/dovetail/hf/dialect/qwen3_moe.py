"""Qwen 3 MoE: many small experts in most layers; router weights may be unnormalized (Yang et al. 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.qwen3 import QWEN3
from dovetail.hf.expert import BalanceLoss, SparseLayers, expert_fields, expert_rows
from dovetail.hf.field import ACTIVATIONS, Choice, Copy
from dovetail.hf.layer import Window
from dovetail.hf.table import Row

EXPERTS, PLAIN = "layers.*.ffn:moe", "layers.*.ffn:glu"

QWEN3_MOE = QWEN3.variant(
    "qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer={"ffn": {"kind": "moe", "router": {"kind": "softmax_router", "normalize": False}}},
    without=("layer_types", "max_window_layers"),
    fields=(
        Window(switch="use_sliding_window"),
        SparseLayers("num_hidden_layers"),
        *expert_fields(EXPERTS),
        Copy("intermediate_size", f"{PLAIN}.hidden"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        BalanceLoss(f"{EXPERTS}.router.balance_loss", "num_experts"),
    ),
    tensors=(
        Row("layers.{}.mlp.gate.weight", "layers.{}.ffn.router.out.weight"),
        *expert_rows("layers.{}.mlp.experts.{expert}", "layers.{}.ffn.bank"),
    ),
    aliases={"num_local_experts": "num_experts"},
    ignored=("max_window_layers",),  # of Qwen 3 without experts
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
    },
)
