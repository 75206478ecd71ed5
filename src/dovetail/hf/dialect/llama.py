"""Llama 1 to 3: pre-RMSNorm, SwiGLU, RoPE, GQA (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.field import ACTIVATIONS, SIZES, Choice, Copy, LegacyFixed, value_at
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import HOUSEKEEPING, INV_FREQ, Dialect, Form, Row, rows
from dovetail.model.model import Model

NORM = {"kind": "rmsnorm", "eps": 1e-6}
# names of the tensors of the ffn, for families that have others
MLP = tuple(f"layers.{{}}.mlp.{name}_proj.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias"))


def _heads_divide_width(spec: Model) -> tuple[str, Any, str] | None:
    """Their config needs heads that divide the width, even where head_dim is given."""
    heads = value_at(spec, "layers.*.mixer.heads")
    bad = isinstance(heads, int) and spec.width % heads
    return ("layers.0.mixer.heads", heads, f"it must divide the width, {spec.width}") if bad else None


LLAMA = Dialect(
    name="llama",
    forms=(Form(architecture="LlamaForCausalLM", prefix="model.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "norm": NORM,
        "head": {"kind": "lm", "tied": False},
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": NORM, "wire": "pre_norm", "mixer": "attention", "ffn": "glu"}],
    },
    fields=(
        *SIZES,
        Copy("num_key_value_heads", "layers.*.mixer.kv_heads"),
        Copy("head_dim", "layers.*.mixer.head"),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Copy("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Copy("mlp_bias", "layers.*.ffn.bias"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
        Rotary("layers.*.mixer.position"),
        LegacyFixed("rope_interleaved", False),
    ),
    fixed={"pretraining_tp": 1},
    ignored=HOUSEKEEPING | {"is_llama_config"},
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        Row("layers.{}.input_layernorm.weight", "layers.{}.mixer_norm.scale"),
        *rows("layers.{}.self_attn.q_proj", "layers.{}.mixer.q"),
        *rows("layers.{}.self_attn.k_proj", "layers.{}.mixer.k"),
        *rows("layers.{}.self_attn.v_proj", "layers.{}.mixer.v"),
        *rows("layers.{}.self_attn.o_proj", "layers.{}.mixer.o"),
        Row("layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.scale"),
        *rows("layers.{}.mlp.gate_proj", "layers.{}.ffn.gate"),
        *rows("layers.{}.mlp.up_proj", "layers.{}.ffn.up"),
        *rows("layers.{}.mlp.down_proj", "layers.{}.ffn.down"),
        Row("norm.weight", "norm.scale"),
    ),
    skips=(INV_FREQ,),
    limits=(_heads_divide_width,),
)
