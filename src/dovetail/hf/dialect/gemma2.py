"""Gemma 2: norms before and after each branch, soft-caps, alternating window and full layers (Gemma Team 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.gemma import GEMMA
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Field, Nullable, Settings, value_at
from dovetail.hf.layer import FULL, SLIDING, LayerTypes
from dovetail.hf.table import Row
from dovetail.model.model import Model


def default(config: Config, layer: int) -> str:
    """Even layers have the sliding window, odd ones full attention."""
    return FULL if layer % 2 else SLIDING


class QueryScale(Field):
    """The number whose root divides the scores; our scale is null where it is the head size."""

    names = ("query_pre_attn_scalar",)
    ours = "layers.*.mixer.scale"

    def to_hf(self, spec: Model) -> dict[str, Any]:
        scale, head = value_at(spec, self.ours), value_at(spec, "layers.*.mixer.head")
        number = head if scale is None else round(scale**-2) if isinstance(scale, float) else None
        return {} if number is None else {self.names[0]: number}

    def from_hf(self, config: Config) -> Settings:
        number = config.get(self.names[0])
        if number is None:
            return {}
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
            raise SpecError(f"config.{self.names[0]}", f"{number!r} is not a number above 0")
        return {self.ours: None if number == config.get("head_dim") else number**-0.5}


GEMMA2 = GEMMA.variant(
    "gemma2",
    architecture="Gemma2ForCausalLM",
    layer={"wire": "sandwich_norm"},
    without=("hidden_act",),
    fields=(
        LayerTypes("num_hidden_layers", default),
        Choice("hidden_activation", "layers.*.ffn.act", ACTIVATIONS),
        QueryScale(),
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
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
