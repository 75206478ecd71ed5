"""Gemma 2: norms before and after each branch, soft-caps, window and full layers in turn (Gemma Team 2024)."""

from __future__ import annotations

from dovetail.port.dialect.gemma import GEMMA
from dovetail.port.layer import FULL, SLIDING, LayerTypes
from dovetail.port.table import ACTIVATIONS, Config, Named, Nullable, Row, Through


def usual(config: Config, layer: int) -> str:
    """Every second layer slides, the first one too."""
    return FULL if layer % 2 else SLIDING


def squared(scale: float) -> int:
    """The whole number whose root the scores are divided by."""
    return round(scale**-2)


GEMMA2 = GEMMA.but(
    "gemma2",
    architecture="Gemma2ForCausalLM",
    layer={"wire": "sandwich"},
    without=("hidden_act",),
    fields=(
        LayerTypes("num_hidden_layers", usual),
        Named("hidden_activation", "layers.*.ffn.act", ACTIVATIONS),
        Through("query_pre_attn_scalar", "layers.*.mixer.scale", there=squared, back=lambda number: number**-0.5),
        Nullable("attn_logit_softcapping", "layers.*.mixer.softcap"),
        Nullable("final_logit_softcapping", "head.softcap"),
    ),
    tensors=(
        Row("layers.{}.post_attention_layernorm.weight", "layers.{}.mixer_post_norm.scale"),
        Row("layers.{}.pre_feedforward_layernorm.weight", "layers.{}.ffn_norm.scale"),
        Row("layers.{}.post_feedforward_layernorm.weight", "layers.{}.ffn_post_norm.scale"),
    ),
    ignored=("cache_implementation", "hidden_act"),
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
