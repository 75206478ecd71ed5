"""Seed-OSS: Llama with biases on q, k and v, and dropout (ByteDance 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy

SEED_OSS = LLAMA.variant(
    "seed_oss",
    architecture="SeedOssForCausalLM",
    fields=(
        Copy("attention_bias", "layers.*.mixer.bias"),
        Copy("attention_out_bias", "layers.*.mixer.out_bias"),
        Copy("residual_dropout", "layers.*.wire.dropout"),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    limits=(),
)
