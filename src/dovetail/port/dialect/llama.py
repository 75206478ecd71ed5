"""Llama 1 to 3: pre-RMSNorm, SwiGLU, rotary, grouped heads (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.model import Model
from dovetail.port.rotary import Rotary
from dovetail.port.table import ACTIVATIONS, HOUSEKEEPING, INV_FREQ, Dialect, Form, Named, Only, Row, Same, look, rows

NORM = {"kind": "rmsnorm", "eps": 1e-6}


def _heads_divide_width(spec: Model) -> tuple[str, Any, str] | None:
    """Their config refuses other widths, even with a head size of its own."""
    heads = look(spec, "layers.*.mixer.heads")
    bad = isinstance(heads, int) and spec.width % heads
    return ("layers.0.mixer.heads", heads, f"it must divide the width, {spec.width}") if bad else None


LLAMA = Dialect(
    name="llama",
    forms=(Form(architecture="LlamaForCausalLM", prefix="model.", tensors=(Row("lm_head.weight", "head.table"),)),),
    spec={
        "norm": NORM,
        "head": {"kind": "lm", "tied": False},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": NORM, "wire": "pre_norm", "mixer": "attention", "ffn": "glu"}],
    },
    layers="num_hidden_layers",
    required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("hidden_size", "width"),
        Same("intermediate_size", "layers.*.ffn.hidden"),
        Same("num_attention_heads", "layers.*.mixer.heads"),
        Same("num_key_value_heads", "layers.*.mixer.kv_heads"),
        Same("head_dim", "layers.*.mixer.head"),
        Same("rms_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Same("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Same("mlp_bias", "layers.*.ffn.bias"),
        Same("attention_dropout", "layers.*.mixer.dropout"),
        Same("tie_word_embeddings", "head.tied"),
        Same("initializer_range", "init.spread"),
        Named("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        Rotary("layers.*.mixer.position"),
        Only("rope_interleaved", False),
    ),
    fixed={"pretraining_tp": 1},
    ignored=HOUSEKEEPING | {"is_llama_config"},
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        Row("layers.{}.input_layernorm.weight", "layers.{}.mixer_norm.scale"),
        *rows("layers.{}.self_attn.q_proj", "layers.{}.mixer.q", "weight", "bias"),
        *rows("layers.{}.self_attn.k_proj", "layers.{}.mixer.k", "weight", "bias"),
        *rows("layers.{}.self_attn.v_proj", "layers.{}.mixer.v", "weight", "bias"),
        *rows("layers.{}.self_attn.o_proj", "layers.{}.mixer.o", "weight", "bias"),
        Row("layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.scale"),
        *rows("layers.{}.mlp.gate_proj", "layers.{}.ffn.gate", "weight", "bias"),
        *rows("layers.{}.mlp.up_proj", "layers.{}.ffn.up", "weight", "bias"),
        *rows("layers.{}.mlp.down_proj", "layers.{}.ffn.down", "weight", "bias"),
        Row("norm.weight", "norm.scale"),
    ),
    skips=(INV_FREQ,),
    limits=(_heads_divide_width,),
)
