"""Qwen 3: Qwen 2 with QK-norm instead of biases (Yang et al. 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import NORM
from dovetail.hf.dialect.qwen2 import QWEN2
from dovetail.hf.field import Copy
from dovetail.hf.table import Row

QWEN3 = QWEN2.variant(
    "qwen3",
    architecture="Qwen3ForCausalLM",
    layer={"mixer": {"bias": False, "qk_norm": NORM}},
    fields=(
        Copy("head_dim", "layers.*.mixer.head"),
        Copy("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
    ),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
