"""Granite: Llama with four multipliers: embedding, attention, residual, logits (IBM 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import ABSENT, Config, Copy, Settings, Transform, value_at
from dovetail.model.model import Model


class AttentionMultiplier(Copy):
    """The scale of the scores. Theirs has no null, so 1/√head is written as a number, and read as null."""

    def __init__(self, mixer: str) -> None:
        super().__init__("attention_multiplier", f"{mixer}.scale")
        self.mixer = mixer

    def to_hf(self, spec: Model) -> dict[str, Any]:
        scale, heads, head = (value_at(spec, f"{self.mixer}.{name}") for name in ("scale", "heads", "head"))
        if scale is ABSENT or scale is not None:
            return super().to_hf(spec)
        size = spec.width // heads if head is None or head is ABSENT else head
        return {self.names[0]: size**-0.5}

    def from_hf(self, config: Config) -> Settings:
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if isinstance(width, int) and isinstance(heads, int) and 0 < heads <= width:
            if config.get(self.names[0]) == (width // heads) ** -0.5:
                return {self.paths[0]: None}
        return super().from_hf(config)


GRANITE = LLAMA.variant(
    "granite",
    architecture="GraniteForCausalLM",
    without=("pretraining_tp", "head_dim"),
    fields=(
        Copy("embedding_multiplier", "embed.scale"),
        AttentionMultiplier("layers.*.mixer"),
        Copy("residual_multiplier", "layers.*.wire.multiplier"),
        Transform("logits_scaling", "head.scale", to_hf=lambda scale: 1 / scale, from_hf=lambda divisor: 1 / divisor),
    ),
    defaults={"attention_multiplier": 1.0},
    limits=(),
)
