"""Mistral: Llama with a sliding window (Jiang et al. 2023)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.layer import Window

MISTRAL = LLAMA.variant(
    "mistral",
    architecture="MistralForCausalLM",
    without=("attention_bias", "mlp_bias", "pretraining_tp"),
    fields=(Window(),),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    limits=(),
)
