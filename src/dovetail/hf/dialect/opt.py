"""OPT: pre-LayerNorm, ReLU, biases, learned positions whose first two rows are unused (Zhang et al. 2022)."""

from __future__ import annotations

from dovetail.hf.field import ACTIVATIONS, Choice, Copy, Implied
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, rows

MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True}
BIASES = ("layers.*.mixer.bias", "layers.*.mixer.out_bias", "layers.*.ffn.bias")

OPT = Dialect(
    name="opt",
    forms=(Form(architecture="OPTForCausalLM", prefix="model.decoder.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "position": {"kind": "learned", "offset": 2},
        "norm": "layernorm",
        "head": "lm",
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "layernorm", "wire": "pre_norm", "mixer": MIXER, "ffn": {"kind": "mlp", "act": "relu"}}],
    },
    required=("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        Implied(
            "word_embed_proj_dim",
            "width",
            by=lambda config: config.get("hidden_size"),
            unsupported="an embedding with another width than the model",
        ),
        Copy("ffn_dim", "layers.*.ffn.hidden"),
        Copy("num_attention_heads", "layers.*.mixer.heads"),
        Copy("max_position_embeddings", "position.length"),
        Copy("dropout", "layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("enable_bias", *BIASES),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("init_std", "init.spread"),
        Choice("activation_function", "layers.*.ffn.act", ACTIVATIONS),
    ),
    fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        Row("embed_positions.weight", "position.table"),
        *rows("layers.{}.self_attn_layer_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.self_attn.q_proj", "layers.{}.mixer.q"),
        *rows("layers.{}.self_attn.k_proj", "layers.{}.mixer.k"),
        *rows("layers.{}.self_attn.v_proj", "layers.{}.mixer.v"),
        *rows("layers.{}.self_attn.out_proj", "layers.{}.mixer.o"),
        *rows("layers.{}.final_layer_norm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("layers.{}.fc1", "layers.{}.ffn.up"),
        *rows("layers.{}.fc2", "layers.{}.ffn.down"),
        *rows("final_layer_norm", "norm", *LAYERNORM),
    ),
    defaults={"dropout": 0.1, "enable_bias": True},
    ignored=HOUSEKEEPING | {"layerdrop", "prefix", "activation_dropout"},
)
