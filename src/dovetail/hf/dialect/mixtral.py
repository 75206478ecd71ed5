"""Mixtral: Mistral with a mixture of experts, two per token (Jiang et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.mistral import MISTRAL
from dovetail.hf.expert import BalanceLoss, expert_rows
from dovetail.hf.field import ACTIVATIONS, Choice, Copy
from dovetail.hf.table import Row

MIXTRAL = MISTRAL.variant(
    "mixtral",
    architecture="MixtralForCausalLM",
    layer={"ffn": {"kind": "moe", "router": "softmax_router"}},
    without=tuple(f"layers.{{}}.mlp.{name}_proj.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias")),
    fields=(
        Copy("num_local_experts", "layers.*.ffn.experts"),
        Copy("num_experts_per_tok", "layers.*.ffn.router.top_k"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        BalanceLoss("layers.*.ffn.router.balance_loss", "num_local_experts"),
    ),
    tensors=(
        Row("layers.{}.block_sparse_moe.gate.weight", "layers.{}.ffn.router.out.weight"),
        *expert_rows(
            "layers.{}.block_sparse_moe.experts.{expert}",
            "layers.{}.ffn.bank",
            gate="w1",
            up="w3",
            down="w2",
            fused="layers.{}.mlp.experts",
        ),
    ),
    fixed={"router_jitter_noise": 0.0},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8},
)
