"""Granite: Llama with a multiplier at each of four places (IBM 2024)."""

from __future__ import annotations

from dovetail.port.dialect.llama import LLAMA
from dovetail.port.table import Same, Through

GRANITE = LLAMA.but(
    "granite",
    architecture="GraniteForCausalLM",
    without=("pretraining_tp", "head_dim"),
    fields=(
        Same("embedding_multiplier", "embed.scale"),
        Same("attention_multiplier", "layers.*.mixer.scale"),
        Same("residual_multiplier", "layers.*.wire.multiplier"),
        Through("logits_scaling", "head.scale", there=lambda scale: 1 / scale, back=lambda by: 1 / by),
    ),
    defaults={"attention_multiplier": 1.0},
    limits=(),
)
