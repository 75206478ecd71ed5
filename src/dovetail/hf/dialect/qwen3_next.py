"""Qwen3-Next: gated DeltaNet layers, gated attention in every fourth, many experts and a shared one, multi-token prediction by
one layer of attention (Qwen 2025)."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import CONCAT, DEPTHWISE
from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.expert import BalanceLoss, SparseLayers, expert_fields, expert_rows, glu_rows
from dovetail.hf.field import Config, Copy, Field, Settings, depth_of, integer, is_kind, value_at
from dovetail.hf.layer import FULL, LAYER_TYPES
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Ahead, Row, ahead_rows
from dovetail.model.model import Model

NORM = {"kind": "rmsnorm", "eps": 1e-6, "plus_one": True}
FFN = {
    "kind": "moe",
    "router": {"kind": "softmax_router"},
    "shared": {"kind": "glu"},
    "shared_gate": True,
}
LINEAR, PERIOD = "linear_attention", "full_attention_interval"
DELTA, FULL_ONE, EXPERTS = "layers.*.mixer:gated_deltanet", "layers.*.mixer:attention", "layers.*.ffn:moe"
THEIRS, FULL_ATTN, OURS = "layers.{}.linear_attn", "layers.{}.self_attn", "layers.{}.mixer"


SIZES = {  # of a gated DeltaNet layer
    "linear_num_value_heads": "heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "key_size",
    "linear_value_head_dim": "value_size",
    "linear_conv_kernel_dim": "conv_size",
}


class DeltaNetLayers(Field):
    """The type of each layer: gated DeltaNet or attention."""

    names = (LAYER_TYPES, PERIOD)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {LAYER_TYPES: [LINEAR if is_kind(value_at(layer, "mixer"), "gated_deltanet") else FULL for layer in spec.layers]}

    def from_hf(self, config: Config) -> Settings:
        count, said, period = depth_of(config, "num_hidden_layers"), config.get(LAYER_TYPES), integer(config, PERIOD, 4, 1)
        words = [LINEAR if (i + 1) % period else FULL for i in range(count)] if said is None else said
        if not isinstance(words, (list, tuple)) or len(words) != count or any(word not in (LINEAR, FULL) for word in words):
            raise SpecError(f"config.{LAYER_TYPES}", f"is not a list of {count} words", f"of {LINEAR} and {FULL}")
        return {f"layers.{i}.mixer": "gated_deltanet" for i, word in enumerate(words) if word == LINEAR}


BACKBONE = LLAMA.variant(
    "qwen3_next",
    architecture="Qwen3NextForCausalLM",
    spec={"norm": NORM},
    layer={"norm": NORM, "mixer": {"gate": True, "qk_norm": NORM}, "ffn": FFN},
    without=("mlp_bias", "pretraining_tp"),
    fields=(
        DeltaNetLayers(),
        SparseLayers("num_hidden_layers"),
        *(Copy(theirs, f"{DELTA}.{ours}") for theirs, ours in SIZES.items()),
        Copy("num_attention_heads", f"{FULL_ONE}.heads"),
        Copy("num_key_value_heads", f"{FULL_ONE}.kv_heads"),
        Copy("head_dim", f"{FULL_ONE}.head"),
        Copy("attention_dropout", f"{FULL_ONE}.dropout"),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", f"{FULL_ONE}.qk_norm.eps", f"{DELTA}.norm.eps"),
        Rotary(f"{FULL_ONE}.position", partial=True),
        *expert_fields(EXPERTS),
        Copy("shared_expert_intermediate_size", f"{EXPERTS}.shared.hidden"),
        Copy("intermediate_size", "layers.*.ffn:glu.hidden"),
        BalanceLoss(f"{EXPERTS}.router.balance_loss", "num_experts"),
    ),
    tensors=(
        Row(f"{FULL_ATTN}.q_proj.weight", f"{OURS}.q.weight", f"{OURS}.gate.weight", interleave=f"{OURS}.heads"),
        Row(f"{FULL_ATTN}.q_norm.weight", f"{OURS}.q_norm.scale"),
        Row(f"{FULL_ATTN}.k_norm.weight", f"{OURS}.k_norm.scale"),
        Row(f"{THEIRS}.in_proj_qkvz.weight", *(f"{OURS}.{name}.weight" for name in "qkvz"), interleave=f"{OURS}.key_heads"),
        Row(f"{THEIRS}.in_proj_ba.weight", *(f"{OURS}.{name}.weight" for name in "ba"), interleave=f"{OURS}.key_heads"),
        Row(f"{THEIRS}.conv1d.weight", *(f"{OURS}.conv_{name}" for name in "qkv"), convert=CONCAT.then(DEPTHWISE)),
        Row(f"{THEIRS}.dt_bias", f"{OURS}.fade_bias"),
        Row(f"{THEIRS}.A_log", f"{OURS}.a_log"),
        Row(f"{THEIRS}.norm.weight", f"{OURS}.norm.scale"),
        Row(f"{THEIRS}.out_proj.weight", f"{OURS}.o.weight", where=f"{OURS}:gated_deltanet"),
        *(
            Row(f"layers.{{}}.self_attn.{name}_proj.weight", f"{OURS}.{name}.weight", where=f"{OURS}:attention")
            for name in "kvo"
        ),
        Row("layers.{}.mlp.gate.weight", "layers.{}.ffn.router.out.weight"),
        *expert_rows("layers.{}.mlp.experts.{expert}", "layers.{}.ffn.bank"),
        *glu_rows("layers.{}.mlp.shared_expert", "layers.{}.ffn.shared"),
        Row("layers.{}.mlp.shared_expert_gate.weight", "layers.{}.ffn.shared_gate.weight"),
    ),
    fixed={"attention_bias": False, "hidden_act": "silu"},  # the convolutions of DeltaNet layers have it too
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    limits=(),
)

MTP = ahead_rows(  # the names leave room for one depth
    BACKBONE.tensors,
    "mtp.layers.{}",
    ("mtp.pre_fc_norm_embedding.weight", "embed_norm.scale"),
    ("mtp.pre_fc_norm_hidden.weight", "hidden_norm.scale"),
    ("mtp.fc.weight", "proj.weight"),
    ("mtp.norm.weight", "norm.scale"),
)
FORM = BACKBONE.forms[0]
QWEN3_NEXT = dc.replace(
    BACKBONE,
    forms=(dc.replace(FORM, tensors=(*FORM.tensors, *MTP)),),  # without the prefix of the layers
    ahead=Ahead(count="num_nextn_predict_layers", marker="mtp.fc.weight", most=1),
)
