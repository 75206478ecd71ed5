"""Cohere 2 (Command A): Cohere with sliding windows in three of four layers, and NoPE in the full ones (Cohere 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.cohere import COHERE
from dovetail.hf.field import Config, Implied, LegacyFixed
from dovetail.hf.layer import LayerTypes, NoPEInFull, all_but_every

PERIOD = "sliding_window_pattern"


def head_size(config: Config) -> int | None:
    """The width divided by the number of heads, which their config class writes as head_dim."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


TYPES = LayerTypes("num_hidden_layers", all_but_every(4, PERIOD), also=(PERIOD,))

COHERE2 = COHERE.variant(
    "cohere2",
    architecture="Cohere2ForCausalLM",
    without=("use_qk_norm",),
    fields=(
        TYPES,
        NoPEInFull(TYPES),
        Implied("head_dim", "layers.*.mixer.head", by=head_size),
        LegacyFixed("rotary_pct", 1.0),
        LegacyFixed("use_embedding_sharing", True),
    ),
    defaults={"logit_scale": 0.0625, "sliding_window": 4096},
)
