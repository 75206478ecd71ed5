"""Mixtral: Mistral whose every ffn is several, of which each token meets two (Jiang et al. 2024)."""

from __future__ import annotations

from dovetail.port.dialect.mistral import MISTRAL
from dovetail.port.expert import BalanceLoss, bank
from dovetail.port.table import ACTIVATIONS, Named, Row, Same

MIXTRAL = MISTRAL.but(
    "mixtral",
    architecture="MixtralForCausalLM",
    layer={"ffn": {"kind": "moe", "router": "softmax_router"}},
    without=tuple(f"layers.{{}}.mlp.{name}_proj.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias")),
    fields=(
        Same("num_local_experts", "layers.*.ffn.experts"),
        Same("num_experts_per_tok", "layers.*.ffn.router.top_k"),
        Named("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        BalanceLoss("layers.*.ffn.router.balance_loss", "num_local_experts"),
    ),
    tensors=(
        Row("layers.{}.block_sparse_moe.gate.weight", "layers.{}.ffn.router.weight"),
        *bank("layers.{}.block_sparse_moe.experts.{expert}", "layers.{}.ffn.bank", gate="w1", up="w3", down="w2"),
    ),
    fixed={"router_jitter_noise": 0.0},
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8},
)
