"""Falcon: attention and FFN in parallel, few KV heads, q, k and v packed per group (Almazrouei et al. 2023)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.field import ACTIVATIONS, Choice, Config, Copy, Field, Settings, value_at
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import LAYERNORM, Dialect, Form, Row, rows
from dovetail.model.model import Model

LAYER = {
    "norm": "layernorm",
    "wire": "parallel",
    "mixer": {"kind": "attention", "packed": True, "kv_heads": 1},
    "ffn": {"kind": "mlp", "act": "gelu", "bias": False},
}


class Architecture(Field):
    """The new architecture has GQA and a norm per branch; the old has one KV head, or as many as heads, and one norm."""

    names = ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        one_norm, groups = value_at(spec, "layers.*.wire.one_norm"), value_at(spec, "layers.*.mixer.kv_heads")
        new = one_norm is False or groups not in (1, value_at(spec, "layers.*.mixer.heads"))
        return {
            "new_decoder_architecture": new,
            "multi_query": groups == 1,
            "num_kv_heads": groups,
            "num_ln_in_parallel_attn": (1 if one_norm else 2) if new else None,
        }

    def from_hf(self, config: Config) -> Settings:
        heads, groups = config.get("num_attention_heads"), config.get("num_kv_heads")
        if config.get("new_decoder_architecture"):
            two = config.get("num_ln_in_parallel_attn") in (None, 2)
            return {"layers.*.mixer.kv_heads": groups or heads, "layers.*.wire.one_norm": not two}
        return {"layers.*.mixer.kv_heads": 1 if config.get("multi_query", True) else heads}


FALCON = Dialect(
    name="falcon",
    forms=(Form(architecture="FalconForCausalLM", prefix="transformer.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={"norm": "layernorm", "head": "lm", "init": {"kind": "normal", "residual": False}, "layers": [LAYER]},
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        Copy("num_attention_heads", "layers.*.mixer.heads"),
        Architecture(),
        Copy("ffn_hidden_size", "layers.*.ffn.hidden"),
        Copy("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Copy("hidden_dropout", "layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias", "layers.*.ffn.bias"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("initializer_range", "init.spread"),
        Choice("activation", "layers.*.ffn.act", ACTIVATIONS),
        Rotary("layers.*.mixer.position"),
    ),
    fixed={"alibi": False, "parallel_attn": True},
    tensors=(
        Row("word_embeddings.weight", "embed.table"),
        *rows("h.{}.input_layernorm", "layers.{}.norm", *LAYERNORM),
        *rows("h.{}.ln_attn", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("h.{}.ln_mlp", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("h.{}.self_attention.query_key_value", "layers.{}.mixer.qkv"),
        *rows("h.{}.self_attention.dense", "layers.{}.mixer.o"),
        *rows("h.{}.mlp.dense_h_to_4h", "layers.{}.ffn.up"),
        *rows("h.{}.mlp.dense_4h_to_h", "layers.{}.ffn.down"),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
)
