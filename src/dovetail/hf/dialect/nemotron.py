"""Nemotron: LayerNorms with an offset of one, squared ReLU, RoPE on half of each head (Parmar et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import LAYERNORM, rows

NORM = {"kind": "layernorm", "plus_one": True}

NEMOTRON = LLAMA.variant(
    "nemotron",
    architecture="NemotronForCausalLM",
    spec={"norm": NORM},
    layer={
        "norm": NORM,
        "mixer": {"position": {"kind": "rope", "fraction": 0.5}},
        "ffn": {"kind": "mlp", "act": "relu2", "bias": False},
    },
    without=("pretraining_tp", "rms_norm_eps", "layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.gate_proj.bias"),
    fields=(
        Copy("norm_eps", "norm.eps", "layers.*.norm.eps"),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        *rows("layers.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("norm", "norm", *LAYERNORM),
    ),
    defaults={"initializer_range": 0.0134},
    limits=(),
)
