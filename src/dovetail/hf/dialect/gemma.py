"""Gemma: Llama with GeGLU, RMSNorm weights stored minus 1, and an embedding times √width (Gemma Team 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA

NORM = {"kind": "rmsnorm", "eps": 1e-6, "plus_one": True}

GEMMA = LLAMA.variant(
    "gemma",
    architecture="GemmaForCausalLM",
    spec={"embed": {"kind": "tokens", "scale_by_width": True}, "norm": NORM, "head": {"kind": "lm", "tied": True}},
    layer={"norm": NORM, "ffn": {"kind": "glu", "act": "gelu_tanh"}},
    without=("mlp_bias", "pretraining_tp"),
    fixed={"use_bidirectional_attention": None},
    ignored=("hidden_activation",),  # in old files beside hidden_act, which decides
    defaults={"num_key_value_heads": 16, "head_dim": 256},
    limits=(),
)
