"""StableLM 2: Llama with LayerNorms, of which a quarter of each head turns (Bellagente et al. 2024)."""

from __future__ import annotations

from dovetail.port.dialect.llama import LLAMA
from dovetail.port.rotary import Rotary
from dovetail.port.table import LAYERNORM, Same, Switch, rows

STABLELM = LLAMA.but(
    "stablelm",
    architecture="StableLmForCausalLM",
    spec={"norm": "layernorm"},
    layer={"norm": "layernorm", "mixer": {"position": {"kind": "rope", "fraction": 0.25}}},
    without=("attention_bias", "mlp_bias", "pretraining_tp", "head_dim", "rms_norm_eps", "norm.weight"),
    fields=(
        Same("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Same("use_qkv_bias", "layers.*.mixer.bias"),
        Switch("use_parallel_residual", "layers.*.wire", on={"kind": "parallel"}, off={"kind": "pre_norm"}),
        Same("hidden_dropout", "layers.*.wire.dropout"),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        *rows("layers.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.input_layernorm", "layers.{}.norm", *LAYERNORM),  # of both branches, where they are parallel
        *rows("layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("norm", "norm", *LAYERNORM),
    ),
    fixed={"qk_layernorm": False},  # a norm for every head by itself, which no other family has
    defaults={"num_key_value_heads": 32},
    limits=(),
)
