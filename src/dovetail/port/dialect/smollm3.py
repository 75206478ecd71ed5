"""SmolLM 3: Llama in which every fourth layer knows no position (Bakouch et al. 2025)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.dialect.llama import LLAMA
from dovetail.port.expert import whole
from dovetail.port.layer import FULL, SLIDING, WINDOW, LayerTypes
from dovetail.port.table import Config, Settings, look


class NoRope:
    """A 1 for each layer that turns, a 0 for each that does not."""

    names = ("no_rope_layers", "no_rope_layer_interval")

    def give(self, spec: Model) -> dict[str, Any]:
        return {self.names[0]: [int(look(block, "mixer.position.base") == _base(spec)) for block in spec.layers]}

    def take(self, config: Config) -> Settings:
        turns = turning(config)
        return {f"layers.{i}.mixer.position": "none" for i, turned in enumerate(turns) if not turned}


def _base(spec: Model) -> Any:
    bases = [look(block, "mixer.position.base") for block in spec.layers]
    return next((base for base in bases if isinstance(base, float)), None)


def turning(config: Config) -> list[int]:
    """Which layers turn."""
    said, count = config.get("no_rope_layers"), config.get("num_hidden_layers")
    if said is None and isinstance(count, int):
        every = whole(config, "no_rope_layer_interval", 4, 1)
        return [int((i + 1) % every != 0) for i in range(min(count, 10_000))]
    if not isinstance(said, (list, tuple)) or len(said) != count:
        raise SpecError("config.no_rope_layers", f"is not a list of {count} numbers, one for each layer")
    return list(said)


def usual(config: Config, layer: int) -> str:
    """Layers without a position slide, if any do."""
    slides = config.get("use_sliding_window") and config.get(WINDOW) is not None
    return SLIDING if slides and not turning(config)[layer] else FULL


SMOLLM3 = LLAMA.but(
    "smollm3",
    architecture="SmolLM3ForCausalLM",
    spec={"head": {"kind": "lm", "tied": True}},
    without=("pretraining_tp", "head_dim"),
    fields=(LayerTypes("num_hidden_layers", usual, switch="use_sliding_window"), NoRope()),
    ignored=("max_window_layers",),
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
    limits=(),
)
