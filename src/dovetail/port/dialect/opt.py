"""OPT: pre-LayerNorm, ReLU, biases, learned positions whose first two rows nobody reads (Zhang et al. 2022)."""

from __future__ import annotations

from dovetail.port.table import ACTIVATIONS, HOUSEKEEPING, LAYERNORM, Dialect, Follows, Form, Named, Row, Same, rows

MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True}
BIASES = ("layers.*.mixer.bias", "layers.*.mixer.out_bias", "layers.*.ffn.bias")

OPT = Dialect(
    name="opt",
    forms=(Form(architecture="OPTForCausalLM", prefix="model.decoder.", tensors=(Row("lm_head.weight", "head.table"),)),),
    spec={
        "position": {"kind": "learned", "offset": 2},
        "norm": "layernorm",
        "head": "lm",
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "layernorm", "wire": "pre_norm", "mixer": MIXER, "ffn": {"kind": "mlp", "act": "relu"}}],
    },
    layers="num_hidden_layers",
    required=("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("hidden_size", "width"),
        Follows(
            "word_embed_proj_dim",
            "width",
            said=lambda config: config.get("hidden_size"),
            unsupported="an embedding with another width than the model",
        ),
        Same("ffn_dim", "layers.*.ffn.hidden"),
        Same("num_attention_heads", "layers.*.mixer.heads"),
        Same("max_position_embeddings", "position.length"),
        Same("dropout", "layers.*.wire.dropout"),
        Same("attention_dropout", "layers.*.mixer.dropout"),
        Same("enable_bias", *BIASES),
        Same("tie_word_embeddings", "head.tied"),
        Same("init_std", "init.spread"),
        Named("activation_function", "layers.*.ffn.act", ACTIVATIONS),
    ),
    fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    tensors=(
        Row("embed_tokens.weight", "embed.table"),
        Row("embed_positions.weight", "position.table"),
        *rows("layers.{}.self_attn_layer_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("layers.{}.self_attn.q_proj", "layers.{}.mixer.q", "weight", "bias"),
        *rows("layers.{}.self_attn.k_proj", "layers.{}.mixer.k", "weight", "bias"),
        *rows("layers.{}.self_attn.v_proj", "layers.{}.mixer.v", "weight", "bias"),
        *rows("layers.{}.self_attn.out_proj", "layers.{}.mixer.o", "weight", "bias"),
        *rows("layers.{}.final_layer_norm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("layers.{}.fc1", "layers.{}.ffn.up", "weight", "bias"),
        *rows("layers.{}.fc2", "layers.{}.ffn.down", "weight", "bias"),
        *rows("final_layer_norm", "norm", *LAYERNORM),
    ),
    defaults={"dropout": 0.1, "enable_bias": True},
    ignored=HOUSEKEEPING | {"layerdrop", "prefix", "activation_dropout"},
)
