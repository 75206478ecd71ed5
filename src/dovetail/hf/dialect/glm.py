"""GLM: Llama with RoPE on adjacent channels of half of each head, biases on q, k, v, packed gate and up (Zeng et al. 2024)."""

from __future__ import annotations

from dovetail.hf.convert import CONCAT
from dovetail.hf.dialect.llama import LLAMA, MLP
from dovetail.hf.field import Copy
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Row

GLM = LLAMA.variant(
    "glm",
    architecture="GlmForCausalLM",
    layer={"mixer": {"position": {"kind": "rope", "pairs": "adjacent", "fraction": 0.5}}},
    without=("mlp_bias", "pretraining_tp", *MLP),
    fields=(
        Copy("attention_bias", "layers.*.mixer.bias"),  # the output projection has none
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        Row("layers.{}.mlp.gate_up_proj.weight", "layers.{}.ffn.gate.weight", "layers.{}.ffn.up.weight", convert=CONCAT),
        Row("layers.{}.mlp.down_proj.weight", "layers.{}.ffn.down.weight"),
    ),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-07},
    limits=(),
)
