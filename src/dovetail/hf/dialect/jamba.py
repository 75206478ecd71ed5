"""Jamba: Mamba layers, periodic attention layers without positions, experts in some layers (Lieber et al. 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.expert import BalanceLoss, PeriodicLayers, expert_rows, glu_rows
from dovetail.hf.field import ABSENT, Config, Copy, LegacyFixed, Settings, value_at
from dovetail.hf.state_space import InnerWidth, TimeStepRank, mamba_rows
from dovetail.hf.table import Row
from dovetail.model.model import Model

SPACE, FULL, EXPERTS = "layers.*.mixer:mamba", "layers.*.mixer:attention", "layers.*.ffn:moe"
LAYER, MAMBA, LAYERS = "layers.{}", "layers.{}.mamba", "num_hidden_layers"
ATTENTION = {"kind": "attention", "position": "none"}
SPARSE = {"kind": "moe", "router": {"kind": "softmax_router", "normalize": False}}
PERIOD, OFFSET = "expert_layer_period", "expert_layer_offset"


class ExpertLayers(PeriodicLayers):
    """Experts in periodic layers; a single expert is a plain FFN."""

    def __init__(self) -> None:
        super().__init__(PERIOD, OFFSET, LAYERS, "ffn", SPARSE, default=(2, 1))
        self.names += ("num_experts",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        count = value_at(spec, f"{EXPERTS}.experts")
        return {"num_experts": 1} if count is ABSENT else {"num_experts": count, **super().to_hf(spec)}

    def from_hf(self, config: Config) -> Settings:
        count = config.get("num_experts", 16)
        return {} if count == 1 else {**super().from_hf(config), f"{EXPERTS}.experts": count}


JAMBA = LLAMA.variant(
    "jamba",
    architecture="JambaForCausalLM",
    layer={"mixer": {"kind": "mamba", "norm": NORM}},
    without=(
        *("attention_bias", "mlp_bias", "pretraining_tp", "head_dim", "rope_parameters", "norm.weight"),
        *(f"{LAYER}.post_attention_layernorm.weight", f"{LAYER}.self_attn.o_proj.bias"),
        *(row.hf_name for row in glu_rows(f"{LAYER}.mlp", f"{LAYER}.ffn")),
    ),
    fields=(
        PeriodicLayers("attn_layer_period", "attn_layer_offset", LAYERS, "mixer", ATTENTION, default=(8, 4)),
        ExpertLayers(),
        Copy("num_attention_heads", f"{FULL}.heads"),
        Copy("num_key_value_heads", f"{FULL}.kv_heads"),
        Copy("attention_dropout", f"{FULL}.dropout"),
        Copy("mamba_d_state", f"{SPACE}.state_size"),
        Copy("mamba_d_conv", f"{SPACE}.conv_size"),
        Copy("mamba_proj_bias", f"{SPACE}.bias"),
        Copy("mamba_conv_bias", f"{SPACE}.conv_bias"),
        InnerWidth("mamba_expand", f"{SPACE}.inner"),
        TimeStepRank("mamba_dt_rank", f"{SPACE}.rank"),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", f"{SPACE}.norm.eps"),
        Copy("intermediate_size", "layers.*.ffn.hidden"),
        Copy("num_experts_per_tok", f"{EXPERTS}.router.top_k"),
        LegacyFixed("mamba_inner_layernorms", True),
        LegacyFixed("sliding_window", None),
        BalanceLoss(f"{EXPERTS}.router.balance_loss", "num_experts"),
    ),
    tensors=(
        *mamba_rows(MAMBA, f"{LAYER}.mixer"),
        Row(f"{MAMBA}.dt_layernorm.weight", f"{LAYER}.mixer.low_norm.scale"),
        Row(f"{MAMBA}.b_layernorm.weight", f"{LAYER}.mixer.b_norm.scale"),
        Row(f"{MAMBA}.c_layernorm.weight", f"{LAYER}.mixer.c_norm.scale"),
        Row(f"{LAYER}.pre_ff_layernorm.weight", f"{LAYER}.ffn_norm.scale"),
        Row(f"{LAYER}.feed_forward.router.weight", f"{LAYER}.ffn.router.out.weight"),
        *expert_rows(f"{LAYER}.feed_forward.experts.{{expert}}", f"{LAYER}.ffn.bank"),
        *glu_rows(f"{LAYER}.feed_forward", f"{LAYER}.ffn"),
        Row(f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mixer.o.weight", where=f"{LAYER}.mixer:attention"),
        Row("final_layernorm.weight", "norm.scale"),
    ),
    fixed={"hidden_act": "silu"},
    ignored=(  # kernels, and the greatest length
        *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "calc_logits_for_entire_prompt"),
        *("max_position_embeddings", "n_ctx"),
    ),
    required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),  # there may be no attention
    defaults={"num_attention_heads": 32, "num_key_value_heads": 8},
    limits=(),
)
