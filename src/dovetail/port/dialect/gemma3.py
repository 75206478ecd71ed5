"""Gemma 3, its text: Gemma 2 with a norm on q and k instead of soft-caps; a rope of its own where a window is (2025)."""

from __future__ import annotations

from dovetail.port.dialect.gemma import NORM
from dovetail.port.dialect.gemma2 import GEMMA2
from dovetail.port.expert import whole
from dovetail.port.layer import FULL, SLIDING, LayerTypes, RotaryByType
from dovetail.port.table import Config, Nullable, Row, Same

PERIOD = "_sliding_window_pattern"


def usual(config: Config, layer: int) -> str:
    """Every sixth layer is full."""
    every = whole(config, "sliding_window_pattern", whole(config, PERIOD, 6, 1), 1)
    return SLIDING if (layer + 1) % every else FULL


TYPES = LayerTypes("num_hidden_layers", usual, also=(PERIOD, "sliding_window_pattern"))


ROPES = RotaryByType(TYPES, {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}, scaled=(FULL,))


GEMMA3 = GEMMA2.but(
    "gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer={"mixer": {"qk_norm": NORM}},
    fields=(
        TYPES,
        ROPES,
        Same("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
        Nullable("final_logit_softcapping", "head.softcap"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
    ),
    # their attention knows the name of a soft-cap and does not apply it
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    defaults={"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
)
