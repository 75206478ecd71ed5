"""Granite: Llama with four multipliers: embedding, attention, residual, logits (IBM 2024)."""

from __future__ import annotations

from dovetail.port.dialect.llama import LLAMA
from dovetail.port.field import Copy, Transform

GRANITE = LLAMA.variant(
    "granite",
    architecture="GraniteForCausalLM",
    without=("pretraining_tp", "head_dim"),
    fields=(
        Copy("embedding_multiplier", "embed.scale"),
        Copy("attention_multiplier", "layers.*.mixer.scale"),
        Copy("residual_multiplier", "layers.*.wire.multiplier"),
        Transform("logits_scaling", "head.scale", to_hf=lambda scale: 1 / scale, from_hf=lambda divisor: 1 / divisor),
    ),
    defaults={"attention_multiplier": 1.0},
    limits=(),
)
