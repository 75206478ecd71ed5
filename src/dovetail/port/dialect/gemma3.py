"""Gemma 3, its text: Gemma 2 with a norm on q and k instead of soft-caps; a rope of its own where a window is (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.dialect.gemma import NORM
from dovetail.port.dialect.gemma2 import GEMMA2
from dovetail.port.layer import FULL, LAYER_TYPES, SLIDING, LayerTypes
from dovetail.port.rotary import LENGTH, Rotary
from dovetail.port.table import Config, Nullable, Row, Same, Settings

PERIOD = "_sliding_window_pattern"


def usual(config: Config, layer: int) -> str:
    """Every sixth layer is full."""
    every = config.get("sliding_window_pattern") or config.get(PERIOD) or 6
    return SLIDING if (layer + 1) % every else FULL


TYPES = LayerTypes("num_hidden_layers", usual, also=(PERIOD, "sliding_window_pattern"))


class RotaryByType:
    """A rope for each type of layer; in older files `rope_theta` is for full layers, `rope_local_base_freq` for the others."""

    names = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", LENGTH)

    def give(self, spec: Model) -> dict[str, Any]:
        words = TYPES.give(spec)[LAYER_TYPES]
        said = {word: Rotary(f"layers.{words.index(word)}.mixer.position").give(spec) for word in sorted(set(words))}
        return {"rope_parameters": {word: one["rope_parameters"] for word, one in said.items() if one}}

    def take(self, config: Config) -> Settings:
        said = config.get("rope_parameters")
        if said is not None and not isinstance(said, Mapping):
            raise SpecError("config.rope_parameters", f"{said!r} is not a mapping")
        old = {
            FULL: {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})},
            SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)},
        }
        found: Settings = {}
        for i, word in enumerate(TYPES.words(config)):
            own = {"rope_parameters": (said or {}).get(word) or old[word], LENGTH: config.get(LENGTH)}
            found |= Rotary(f"layers.{i}.mixer.position").take(own)
        return found


GEMMA3 = GEMMA2.but(
    "gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer={"mixer": {"qk_norm": NORM}},
    fields=(
        TYPES,
        RotaryByType(),
        Same("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
        Nullable("final_logit_softcapping", "head.softcap"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
    ),
    # their attention knows the name of a soft-cap and does not apply it
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    defaults={"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
)
