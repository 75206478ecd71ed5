"""GLM-4 (0414): GLM with norms before and after each branch (Z.ai 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.glm import GLM
from dovetail.hf.table import Row

GLM4 = GLM.variant(
    "glm4",
    architecture="Glm4ForCausalLM",
    layer={"wire": "sandwich_norm"},
    tensors=(
        Row("layers.{}.post_self_attn_layernorm.weight", "layers.{}.mixer_post_norm.scale"),
        Row("layers.{}.post_mlp_layernorm.weight", "layers.{}.ffn_post_norm.scale"),
    ),
)
