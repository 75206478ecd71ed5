"""XGLM: pre-LayerNorm, biases, sinusoids in halves that start at 2, a scaled embedding (Lin et al. 2021)."""

from __future__ import annotations

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.bart import attention
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Copy, Field, Settings
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows

OFFSET = 2
MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True, "dropout": 0.1}
LAYER = {
    "norm": "layernorm",
    "wire": {"kind": "pre_norm", "dropout": 0.1},
    "mixer": MIXER,
    "ffn": {"kind": "mlp", "act": "gelu"},
}


class PaddingRow(Field):
    """Their table of sinusoids is zero at the row of the padding token, which no token may use."""

    names = ("pad_token_id",)

    def from_hf(self, config: Config) -> Settings:
        pad = config.get("pad_token_id")
        if pad is not None and (not isinstance(pad, int) or not 0 <= pad < OFFSET):
            problem = f"{pad!r} is unsupported: the position of index {pad!r} would be zero"
            raise SpecError("config.pad_token_id", problem, f"supported: null, or below {OFFSET}")
        return {}


XGLM = Dialect(
    name="xglm",
    forms=(Form(architecture="XGLMForCausalLM", prefix="model.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "embed": {"kind": "tokens", "scale_by_width": True},
        "position": {"kind": "sinusoidal", "halves": True, "endpoint": True, "offset": OFFSET},
        "dropout": 0.1,
        "norm": "layernorm",
        "head": "lm",
        "init": {"kind": "normal", "residual": False},
        "layers": [LAYER],
    },
    layers="num_layers",
    required=("vocab_size", "d_model", "ffn_dim", "num_layers", "attention_heads"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("d_model", "width"),
        Copy("ffn_dim", "layers.*.ffn.hidden"),
        Copy("attention_heads", "layers.*.mixer.heads"),
        Copy("scale_embedding", "embed.scale_by_width"),
        Copy("dropout", "dropout", "layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("activation_dropout", "layers.*.ffn.dropout"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("init_std", "init.spread"),
        Choice("activation_function", "layers.*.ffn.act", ACTIVATIONS),
        PaddingRow(),
    ),
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        *attention("layers.{}.self_attn", "layers.{}.mixer"),
        *rows("layers.{}.self_attn_layer_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.final_layer_norm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("layers.{}.fc1", "layers.{}.ffn.up"),
        *rows("layers.{}.fc2", "layers.{}.ffn.down"),
        *rows("layer_norm", "norm", *LAYERNORM),
    ),
    fixed={"add_cross_attention": False},
    ignored=HOUSEKEEPING | {"layerdrop", "max_position_embeddings"},  # sinusoids have no greatest length
    skips=(Skip("*embed_positions.weights", "sinusoids, computed from the config"),),
)
