"""ERNIE 4.5: Llama with RoPE on adjacent channels and one switch for all biases (Baidu 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy

ERNIE4_5 = LLAMA.variant(
    "ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    spec={"head": {"kind": "lm", "tied": True}},
    layer={"mixer": {"position": {"kind": "rope", "pairs": "adjacent"}}},
    without=("attention_bias", "attention_dropout", "mlp_bias", "pretraining_tp"),
    fields=(Copy("use_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias", "layers.*.ffn.bias"),),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    limits=(),
)
