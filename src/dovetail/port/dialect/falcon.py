"""Falcon: attention and ffn side by side, few key heads, q, k and v packed group by group (Almazrouei et al. 2023)."""

from __future__ import annotations

from typing import Any

from dovetail.model import Model
from dovetail.port.rotary import Rotary
from dovetail.port.table import ACTIVATIONS, LAYERNORM, Config, Dialect, Form, Named, Row, Same, Settings, look, rows

LAYER = {
    "norm": "layernorm",
    "wire": "parallel",
    "mixer": {"kind": "attention", "packed": True, "kv_heads": 1},
    "ffn": {"kind": "mlp", "act": "gelu", "bias": False},
}


class Architecture:
    """The new one has groups of heads and a norm for each branch; the old one key head, or as many as heads, and one norm."""

    names = ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn")

    def give(self, spec: Model) -> dict[str, Any]:
        one_norm, groups = look(spec, "layers.*.wire.one_norm"), look(spec, "layers.*.mixer.kv_heads")
        new = one_norm is False or groups not in (1, look(spec, "layers.*.mixer.heads"))
        return {
            "new_decoder_architecture": new,
            "multi_query": groups == 1,
            "num_kv_heads": groups,
            "num_ln_in_parallel_attn": (1 if one_norm else 2) if new else None,
        }

    def take(self, config: Config) -> Settings:
        heads, groups = config.get("num_attention_heads"), config.get("num_kv_heads")
        if config.get("new_decoder_architecture"):
            two = config.get("num_ln_in_parallel_attn") in (None, 2)
            return {"layers.*.mixer.kv_heads": groups or heads, "layers.*.wire.one_norm": not two}
        return {"layers.*.mixer.kv_heads": 1 if config.get("multi_query", True) else heads}


FALCON = Dialect(
    name="falcon",
    forms=(Form(architecture="FalconForCausalLM", prefix="transformer.", tensors=(Row("lm_head.weight", "head.table"),)),),
    spec={"norm": "layernorm", "head": "lm", "init": {"kind": "normal", "residual": False}, "layers": [LAYER]},
    layers="num_hidden_layers",
    required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("hidden_size", "width"),
        Same("num_attention_heads", "layers.*.mixer.heads"),
        Architecture(),
        Same("ffn_hidden_size", "layers.*.ffn.hidden"),
        Same("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Same("hidden_dropout", "layers.*.wire.dropout"),
        Same("attention_dropout", "layers.*.mixer.dropout"),
        Same("bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias", "layers.*.ffn.bias"),
        Same("tie_word_embeddings", "head.tied"),
        Same("initializer_range", "init.spread"),
        Named("activation", "layers.*.ffn.act", ACTIVATIONS),
        Rotary("layers.*.mixer.position"),
    ),
    fixed={"alibi": False, "parallel_attn": True},
    tensors=(
        Row("word_embeddings.weight", "embed.table"),
        *rows("h.{}.input_layernorm", "layers.{}.norm", *LAYERNORM),
        *rows("h.{}.ln_attn", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("h.{}.ln_mlp", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("h.{}.self_attention.query_key_value", "layers.{}.mixer.qkv", "weight", "bias"),
        *rows("h.{}.self_attention.dense", "layers.{}.mixer.o", "weight", "bias"),
        *rows("h.{}.mlp.dense_h_to_4h", "layers.{}.ffn.up", "weight", "bias"),
        *rows("h.{}.mlp.dense_4h_to_h", "layers.{}.ffn.down", "weight", "bias"),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
)
