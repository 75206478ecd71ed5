"""Helium: Llama with RoPE on adjacent channels (Kyutai 2025)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy, value_at
from dovetail.model.model import Model


def _heads_fill_width(spec: Model) -> tuple[str, Any, str] | None:
    """Their output projection is square, whatever head_dim is."""
    heads, head = value_at(spec, "layers.*.mixer.heads"), value_at(spec, "layers.*.mixer.head")
    bad = isinstance(heads, int) and isinstance(head, int) and heads * head != spec.width
    return ("layers.0.mixer.head", head, f"{heads} heads must fill the width, {spec.width}") if bad else None


HELIUM = LLAMA.variant(
    "helium",
    architecture="HeliumForCausalLM",
    layer={"mixer": {"position": {"kind": "rope", "pairs": "adjacent"}}},
    without=("pretraining_tp",),
    fields=(Copy("attention_bias", "layers.*.mixer.bias"),),  # the output projection has none
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    limits=(_heads_fill_width,),
)
