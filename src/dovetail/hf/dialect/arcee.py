"""Arcee (AFM): Llama with a plain FFN of squared ReLU instead of a gated one (Arcee AI 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA

ARCEE = LLAMA.variant(
    "arcee",
    architecture="ArceeForCausalLM",
    layer={"ffn": {"kind": "mlp", "act": "relu2", "bias": False}},
    without=("layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.gate_proj.bias", "pretraining_tp"),
    defaults={"rms_norm_eps": 1e-5},
)
