"""Granite MoE: Granite with experts whose gate and up matrices are packed (IBM 2024)."""

from __future__ import annotations

from dovetail.hf.convert import Concat
from dovetail.hf.dialect.granite import GRANITE
from dovetail.hf.dialect.llama import MLP
from dovetail.hf.expert import DOWN, GATE_UP, BalanceLoss
from dovetail.hf.field import Copy
from dovetail.hf.table import Row

MOE, BANK = "layers.{}.block_sparse_moe", "layers.{}.ffn.bank"
EXPERTS = (
    Row(f"{MOE}.router.layer.weight", "layers.{}.ffn.router.out.weight"),
    Row(
        f"{MOE}.input_linear.weight",
        f"{BANK}.gate.weight",
        f"{BANK}.up.weight",
        convert=Concat(1),
        fused=f"{MOE}.experts.{GATE_UP}",
    ),
    Row(f"{MOE}.output_linear.weight", f"{BANK}.down.weight", fused=f"{MOE}.experts.{DOWN}"),
)

GRANITEMOE = GRANITE.variant(
    "granitemoe",
    architecture="GraniteMoeForCausalLM",
    layer={"ffn": {"kind": "moe", "router": "softmax_router"}},
    without=("mlp_bias", *MLP),
    fields=(
        Copy("num_local_experts", "layers.*.ffn.experts"),
        Copy("num_experts_per_tok", "layers.*.ffn.router.top_k"),
        BalanceLoss("layers.*.ffn.router.balance_loss", "num_local_experts"),
    ),
    tensors=EXPERTS,
    defaults={"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
)
