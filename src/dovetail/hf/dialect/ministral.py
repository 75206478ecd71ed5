"""Ministral: Mistral whose layers may differ in their window (Mistral AI 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.mistral import MISTRAL
from dovetail.hf.field import Config
from dovetail.hf.layer import FULL, SLIDING, WINDOW, LayerTypes


def default(config: Config, layer: int) -> str:
    """All layers have the window, if there is one."""
    return FULL if config.get(WINDOW) is None else SLIDING


MINISTRAL = MISTRAL.variant(
    "ministral",
    architecture="MinistralForCausalLM",
    fields=(LayerTypes("num_hidden_layers", default),),
)
