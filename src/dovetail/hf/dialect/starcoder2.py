"""StarCoder 2: LayerNorms, a plain FFN, biases, RoPE, GQA, an optional sliding window (Lozhkov et al. 2024)."""

from __future__ import annotations

from dovetail.hf.dialect.llama import LLAMA, MLP
from dovetail.hf.field import Copy
from dovetail.hf.layer import Window
from dovetail.hf.table import LAYERNORM, rows

BIASES = ("mixer.bias", "mixer.out_bias", "ffn.bias")

STARCODER2 = LLAMA.variant(
    "starcoder2",
    architecture="Starcoder2ForCausalLM",
    spec={"norm": "layernorm", "head": {"kind": "lm", "tied": True}},
    layer={"norm": "layernorm", "ffn": {"kind": "mlp", "act": "gelu_tanh"}},
    without=(
        *("attention_bias", "mlp_bias", "pretraining_tp", "head_dim", "rms_norm_eps", "norm.weight"),
        *MLP,
    ),
    fields=(
        Window(),
        Copy("norm_epsilon", "norm.eps", "layers.*.norm.eps"),
        Copy("use_bias", *(f"layers.*.{name}" for name in BIASES)),
        Copy("residual_dropout", "layers.*.wire.dropout"),
        Copy("embedding_dropout", "dropout"),
    ),
    tensors=(
        *rows("layers.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("layers.{}.mlp.c_fc", "layers.{}.ffn.up"),
        *rows("layers.{}.mlp.c_proj", "layers.{}.ffn.down"),
        *rows("norm", "norm", *LAYERNORM),
    ),
    defaults={"use_bias": True, "num_key_value_heads": 2, "initializer_range": 0.018042},
    limits=(),
)
