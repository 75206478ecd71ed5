"""OLMo 2: Llama with norms on the output of each branch, and on all of q and k (OLMo Team 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.field import Copy
from dovetail.hf.table import Row

OLMO2 = LLAMA.variant(
    "olmo2",
    architecture="Olmo2ForCausalLM",
    layer={"wire": "res_post_norm", "mixer": {"qk_norm": NORM, "qk_norm_whole": True}},
    without=("mlp_bias", "pretraining_tp", "head_dim", "layers.{}.input_layernorm.weight"),
    fields=(Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
        Row("layers.{}.post_attention_layernorm.weight", "layers.{}.mixer_norm.scale"),
        Row("layers.{}.post_feedforward_layernorm.weight", "layers.{}.ffn_norm.scale"),
    ),
    defaults={"rms_norm_eps": 1e-5},
    limits=(),
)
