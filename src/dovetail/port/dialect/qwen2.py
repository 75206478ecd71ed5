"""Qwen 2: Llama with biases on q, k and v; upper layers may have a window (Yang et al. 2024)."""

from __future__ import annotations

from dovetail.port.dialect.llama import LLAMA
from dovetail.port.layer import FULL, SLIDING, WINDOW, LayerTypes
from dovetail.port.table import Config


def usual(config: Config, layer: int) -> str:
    """Layers from `max_window_layers` on slide, if any do."""
    slides = config.get("use_sliding_window") and config.get(WINDOW) is not None
    return SLIDING if slides and layer >= config.get("max_window_layers", 28) else FULL


QWEN2 = LLAMA.but(
    "qwen2",
    architecture="Qwen2ForCausalLM",
    layer={"mixer": {"bias": True}},
    without=("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"),
    fields=(LayerTypes("num_hidden_layers", usual, switch="use_sliding_window", also=("max_window_layers",)),),
    defaults={"num_key_value_heads": 32},
    limits=(),
)
