"""EXAONE 4: norms on the output of each branch, QK-norm, NoPE in the full layers among window layers (LG AI Research 2025)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, NORM
from dovetail.hf.field import Config, Copy, integer
from dovetail.hf.layer import FULL, SLIDING, WINDOW, LayerTypes, NoPEInFull
from dovetail.hf.table import Row

PERIOD = "sliding_window_pattern"


def default(config: Config, layer: int) -> str:
    """Every fourth layer is full; all are where there is no window."""
    every = integer(config, PERIOD, 4, 1) if config.get(WINDOW) is not None else 1
    return SLIDING if (layer + 1) % every else FULL


TYPES = LayerTypes("num_hidden_layers", default, also=(PERIOD,))

EXAONE4 = LLAMA.variant(
    "exaone4",
    architecture="Exaone4ForCausalLM",
    layer={"wire": "res_post_norm", "mixer": {"qk_norm": NORM}},
    without=("attention_bias", "mlp_bias", "pretraining_tp", "layers.{}.input_layernorm.weight"),
    fields=(
        TYPES,
        NoPEInFull(TYPES, unless_null=True),
        Copy("rms_norm_eps", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps"),
    ),
    tensors=(
        Row("layers.{}.self_attn.q_norm.weight", "layers.{}.mixer.q_norm.scale"),
        Row("layers.{}.self_attn.k_norm.weight", "layers.{}.mixer.k_norm.scale"),
        Row("layers.{}.post_attention_layernorm.weight", "layers.{}.mixer_norm.scale"),
        Row("layers.{}.post_feedforward_layernorm.weight", "layers.{}.ffn_norm.scale"),
    ),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    limits=(),
)
