"""Qwen 2 MoE: Qwen 2 with many small experts and a gated shared one; windows in every other layer (Yang et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.qwen2 import QWEN2
from dovetail.hf.expert import BalanceLoss, SparseLayers, expert_fields, expert_rows, glu_rows
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Copy
from dovetail.hf.layer import FULL, SLIDING, LayerTypes
from dovetail.hf.table import Row

EXPERTS = "layers.*.ffn:moe"
FFN = {
    "kind": "moe",
    "router": {"kind": "softmax_router", "normalize": False},
    "shared": {"kind": "glu"},
    "shared_gate": True,
}


def default(config: Config, layer: int) -> str:
    """Even layers below `max_window_layers` have the sliding window, if it is turned on."""
    slides = config.get("use_sliding_window") and layer < config.get("max_window_layers", 28)
    return SLIDING if slides and layer % 2 == 0 else FULL


QWEN2_MOE = QWEN2.variant(
    "qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    layer={"ffn": FFN},
    fields=(
        LayerTypes("num_hidden_layers", default, switch="use_sliding_window", also=("max_window_layers",)),
        Copy("qkv_bias", "layers.*.mixer.bias"),
        SparseLayers("num_hidden_layers"),
        *expert_fields(EXPERTS),
        Copy("shared_expert_intermediate_size", f"{EXPERTS}.shared.hidden"),
        Copy("intermediate_size", "layers.*.ffn:glu.hidden"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS, also=(f"{EXPERTS}.shared.act",)),
        BalanceLoss(f"{EXPERTS}.router.balance_loss", "num_experts"),
    ),
    tensors=(
        Row("layers.{}.mlp.gate.weight", "layers.{}.ffn.router.out.weight"),
        *expert_rows("layers.{}.mlp.experts.{expert}", "layers.{}.ffn.bank"),
        *glu_rows("layers.{}.mlp.shared_expert", "layers.{}.ffn.shared"),
        Row("layers.{}.mlp.shared_expert_gate.weight", "layers.{}.ffn.shared_gate.weight"),
    ),
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "sliding_window": 4096,
    },
)
