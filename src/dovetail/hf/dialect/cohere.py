"""Cohere (Command R): attention and FFN in parallel after one LayerNorm without shift, scaled logits (Cohere 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy
from dovetail.hf.table import Row

NORM = {"kind": "layernorm", "shift": False}

COHERE = LLAMA.variant(
    "cohere",
    architecture="CohereForCausalLM",
    spec={"norm": NORM, "head": {"kind": "lm", "tied": True}},
    layer={"norm": NORM, "wire": "parallel", "mixer": {"position": {"kind": "rope", "pairs": "adjacent"}}},
    without=(
        *("head_dim", "mlp_bias", "pretraining_tp", "rms_norm_eps"),
        "layers.{}.post_attention_layernorm.weight",
    ),
    fields=(
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Copy("logit_scale", "head.scale"),
    ),
    tensors=(Row("layers.{}.input_layernorm.weight", "layers.{}.norm.scale"),),
    fixed={"use_qk_norm": False},  # a LayerNorm with a scale of its own for each head
    defaults={"logit_scale": 0.0625, "rope_theta": 5e5},
    limits=(),
)
