"""Llama 1 to 3: pre-RMSNorm, SwiGLU, rotary, grouped heads (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.model import Model
from dovetail.port.rotary import Rotary
from dovetail.port.table import ACTIVATIONS, HOUSEKEEPING, Dialect, Named, Row, Same, look

NORM = {"kind": "rms", "eps": 1e-6}


def _heads_divide_width(spec: Model) -> tuple[str, Any, str] | None:
    """Their config refuses other widths, even with a head size of its own."""
    heads = look(spec, "layers.*.mixer.heads")
    bad = isinstance(heads, int) and spec.width % heads
    return ("layers.0.mixer.heads", heads, f"it must divide the width, {spec.width}") if bad else None


LLAMA = Dialect(
    name="llama",
    architecture="LlamaForCausalLM",
    spec={
        "norm": NORM,
        "head": {"kind": "lm", "tied": False},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": NORM, "wire": "pre", "mixer": "attention", "ffn": "glu"}],
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
    ),
    fixed={"pretraining_tp": 1, "is_encoder_decoder": False},
    ignored=HOUSEKEEPING,
    tensors=(
        Row("model.embed_tokens.weight", "embed.table"),
        Row("model.layers.{}.input_layernorm.weight", "layers.{}.mixer_norm.scale"),
        Row("model.layers.{}.self_attn.q_proj.weight", "layers.{}.mixer.q.weight"),
        Row("model.layers.{}.self_attn.q_proj.bias", "layers.{}.mixer.q.bias"),
        Row("model.layers.{}.self_attn.k_proj.weight", "layers.{}.mixer.k.weight"),
        Row("model.layers.{}.self_attn.k_proj.bias", "layers.{}.mixer.k.bias"),
        Row("model.layers.{}.self_attn.v_proj.weight", "layers.{}.mixer.v.weight"),
        Row("model.layers.{}.self_attn.v_proj.bias", "layers.{}.mixer.v.bias"),
        Row("model.layers.{}.self_attn.o_proj.weight", "layers.{}.mixer.o.weight"),
        Row("model.layers.{}.self_attn.o_proj.bias", "layers.{}.mixer.o.bias"),
        Row("model.layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.scale"),
        Row("model.layers.{}.mlp.gate_proj.weight", "layers.{}.ffn.gate.weight"),
        Row("model.layers.{}.mlp.gate_proj.bias", "layers.{}.ffn.gate.bias"),
        Row("model.layers.{}.mlp.up_proj.weight", "layers.{}.ffn.up.weight"),
        Row("model.layers.{}.mlp.up_proj.bias", "layers.{}.ffn.up.bias"),
        Row("model.layers.{}.mlp.down_proj.weight", "layers.{}.ffn.down.weight"),
        Row("model.layers.{}.mlp.down_proj.bias", "layers.{}.ffn.down.bias"),
        Row("model.norm.weight", "norm.scale"),
        Row("lm_head.weight", "head.table"),
    ),
    stale=("*.rotary_emb.inv_freq",),
    limits=(_heads_divide_width,),
)
