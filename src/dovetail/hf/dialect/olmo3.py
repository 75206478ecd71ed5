"""OLMo 3: OLMo 2 with sliding windows in three of four layers, and RoPE parameters per layer type (OLMo Team 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.olmo2 import OLMO2
from dovetail.hf.layer import FULL, SLIDING, LayerTypes, RotaryByType, all_but_every

TYPES = LayerTypes("num_hidden_layers", all_but_every(4))
ROPES = RotaryByType(TYPES, {FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)}, scaled=(FULL,))

OLMO3 = OLMO2.variant(
    "olmo3",
    architecture="Olmo3ForCausalLM",
    fields=(TYPES, ROPES),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
)
