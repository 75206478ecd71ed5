"""Qwen 2: Llama with biases on q, k and v; upper layers may have a sliding window (Yang et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Config
from dovetail.hf.layer import FULL, SLIDING, WINDOW, LayerTypes


def default(config: Config, layer: int) -> str:
    """Layers from `max_window_layers` on have the sliding window, if it is turned on."""
    slides = config.get("use_sliding_window") and config.get(WINDOW) is not None
    return SLIDING if slides and layer >= config.get("max_window_layers", 28) else FULL


QWEN2 = LLAMA.variant(
    "qwen2",
    architecture="Qwen2ForCausalLM",
    layer={"mixer": {"bias": True}},
    without=("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"),
    fields=(LayerTypes("num_hidden_layers", default, switch="use_sliding_window", also=("max_window_layers",)),),
    defaults={"num_key_value_heads": 32},
    limits=(),
)
