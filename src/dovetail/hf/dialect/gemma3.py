"""Gemma 3 (text): Gemma 2 with QK-norm instead of soft-caps, and RoPE parameters of their own for window layers (2025)."""

from __future__ import annotations

from dovetail.hf.dialect.gemma import NORM
from dovetail.hf.dialect.gemma2 import GEMMA2
from dovetail.hf.field import Config, Copy, Nullable, integer
from dovetail.hf.layer import FULL, SLIDING, LayerTypes, RotaryByType
from dovetail.hf.table import Row

PERIOD = "_sliding_window_pattern"


def default(config: Config, layer: int) -> str:
    """Every sixth layer is full."""
    every = integer(config, "sliding_window_pattern", integer(config, PERIOD, 6, 1), 1)
    return SLIDING if (layer + 1) % every else FULL


TYPES = LayerTypes("num_hidden_layers", default, also=(PERIOD, "sliding_window_pattern"))


ROPES = RotaryByType(TYPES, {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}, scaled=(FULL,))


GEMMA3 = GEMMA2.variant(
    "gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer={"mixer": {"qk_norm": NORM}},
    fields=(
        TYPES,
        ROPES,
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
        Nullable("final_logit_softcapping", "head.softcap"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
    ),
    # their attention has the field of a soft-cap and does not apply it
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    defaults={"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
)
