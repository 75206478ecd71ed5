"""SmolLM 3: Llama with NoPE in every fourth layer (Bakouch et al. 2025)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_LAYERS
from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Config, Field, Settings, integer, value_at
from dovetail.hf.layer import FULL, SLIDING, WINDOW, LayerTypes
from dovetail.model.model import Model


class NoRope(Field):
    """1 for each layer with RoPE, 0 for each without."""

    names = ("no_rope_layers", "no_rope_layer_interval")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {self.names[0]: [int(value_at(block, "mixer.position.base") == _base(spec)) for block in spec.layers]}

    def from_hf(self, config: Config) -> Settings:
        layers = rope_layers(config)
        return {f"layers.{i}.mixer.position": "none" for i, rotated in enumerate(layers) if not rotated}


def _base(spec: Model) -> Any:
    bases = [value_at(block, "mixer.position.base") for block in spec.layers]
    return next((base for base in bases if isinstance(base, float)), None)


def rope_layers(config: Config) -> list[int]:
    """1 or 0 for each layer, with RoPE or without."""
    listed, count = config.get("no_rope_layers"), config.get("num_hidden_layers")
    if listed is None and isinstance(count, int):
        every = integer(config, "no_rope_layer_interval", 4, 1)
        return [int((i + 1) % every != 0) for i in range(min(count, CONFIG_LAYERS))]
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        raise SpecError("config.no_rope_layers", f"is not a list of {count} numbers, one for each layer")
    return list(listed)


def default(config: Config, layer: int) -> str:
    """Layers without RoPE have the sliding window, if it is turned on."""
    slides = config.get("use_sliding_window") and config.get(WINDOW) is not None
    return SLIDING if slides and not rope_layers(config)[layer] else FULL


SMOLLM3 = LLAMA.variant(
    "smollm3",
    architecture="SmolLM3ForCausalLM",
    spec={"head": {"kind": "lm", "tied": True}},
    without=("pretraining_tp", "head_dim"),
    fields=(LayerTypes("num_hidden_layers", default, switch="use_sliding_window"), NoRope()),
    ignored=("max_window_layers",),
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
    limits=(),
)
