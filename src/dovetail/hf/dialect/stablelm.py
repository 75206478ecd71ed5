"""StableLM 2: Llama with LayerNorms and RoPE on a quarter of each head (Bellagente et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy, Switch
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import LAYERNORM, rows

STABLELM = LLAMA.variant(
    "stablelm",
    architecture="StableLmForCausalLM",
    spec={"norm": "layernorm"},
    layer={"norm": "layernorm", "mixer": {"position": {"kind": "rope", "fraction": 0.25}}},
    without=("attention_bias", "mlp_bias", "pretraining_tp", "head_dim", "rms_norm_eps", "norm.weight"),
    fields=(
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Copy("use_qkv_bias", "layers.*.mixer.bias"),
        Switch("use_parallel_residual", "layers.*.wire", on={"kind": "parallel"}, off={"kind": "pre_norm"}),
        Copy("hidden_dropout", "layers.*.wire.dropout"),
        Rotary("layers.*.mixer.position", partial=True),
    ),
    tensors=(
        *rows("layers.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.input_layernorm", "layers.{}.norm", *LAYERNORM),  # one norm for both branches, where they are parallel
        *rows("layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("norm", "norm", *LAYERNORM),
    ),
    fixed={"qk_layernorm": False},  # a LayerNorm per head
    defaults={"num_key_value_heads": 32},
    limits=(),
)
