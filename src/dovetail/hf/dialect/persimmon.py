"""Persimmon: squared ReLU, LayerNorms, QK-norm with shifts, RoPE on half of each head, q, k and v packed (Adept 2023)."""

from __future__ import annotations

from dovetail.hf.dialect.gpt_neox import GPT_NEOX
from dovetail.hf.field import Copy, Switch
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import INV_FREQ, LAYERNORM, Form, Row, rows

QK_NORM = "layers.*.mixer.qk_norm"
LAYER = {"norm": "layernorm", "wire": {"kind": "pre_norm"}, "ffn": {"kind": "mlp", "act": "relu2"}}

PERSIMMON = GPT_NEOX.variant(
    "persimmon",
    forms=(Form(architecture="PersimmonForCausalLM", prefix="model.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    layer={**LAYER, "mixer": {"qk_norm": "layernorm", "position": {"kind": "rope", "fraction": 0.5}}},
    without=(
        *("use_parallel_residual", "attention_bias", "embed_in.weight", "final_layer_norm.weight", "final_layer_norm.bias"),
        *(f"layers.{{}}.attention.{name}.{leaf}" for name in ("query_key_value", "dense") for leaf in ("weight", "bias")),
    ),
    fields=(
        Switch("qk_layernorm", QK_NORM, on={"kind": "layernorm"}, off=None),
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps", f"{QK_NORM}:layernorm.eps"),
        Copy("hidden_dropout", "layers.*.wire.dropout"),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        *rows("layers.{}.self_attn.query_key_value", "layers.{}.mixer.qkv"),
        *rows("layers.{}.self_attn.dense", "layers.{}.mixer.o"),
        *rows("layers.{}.self_attn.q_layernorm", "layers.{}.mixer.q_norm", *LAYERNORM),
        *rows("layers.{}.self_attn.k_layernorm", "layers.{}.mixer.k_norm", *LAYERNORM),
        *rows("final_layernorm", "norm", *LAYERNORM),
    ),
    aliases={},
    skips=(INV_FREQ,),
)
