"""Hunyuan dense: Llama with QK-norm after the rotation (Tencent 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.field import Copy, LegacyFixed
from dovetail.hf.table import Row

HUNYUAN_V1_DENSE = LLAMA.variant(
    "hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    layer={"mixer": {"qk_norm": NORM, "qk_norm_after": True}},
    without=("mlp_bias",),
    fields=(
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
        LegacyFixed("use_qk_norm", True),
        LegacyFixed("use_cla", False),
    ),
    tensors=(
        Row("layers.{}.self_attn.query_layernorm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.key_layernorm.weight", "layers.{}.mixer.k_norm.scale"),
    ),
    ignored=("eod_token_id",),
    defaults={"rms_norm_eps": 1e-5},
    limits=(),
)
