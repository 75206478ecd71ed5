"""BLOOM: ALiBi, a norm after the embedding, biases, q, k and v packed per head (Scao et al. 2022)."""

from __future__ import annotations

from dovetail.hf.field import Copy
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, rows

MIXER = {"kind": "attention", "packed": True, "bias": True, "out_bias": True, "position": "alibi"}
EPS = ("norm.eps", "embed_norm.eps", "layers.*.norm.eps")

BLOOM = Dialect(
    name="bloom",
    forms=(Form(architecture="BloomForCausalLM", prefix="transformer.", tensors=(Row("lm_head.weight", "head.out.weight"),)),),
    spec={
        "embed_norm": "layernorm",
        "norm": "layernorm",
        "head": "lm",
        "init": {"kind": "normal", "residual": False},
        "layers": [{"norm": "layernorm", "wire": "pre_norm", "mixer": MIXER, "ffn": {"kind": "mlp", "act": "gelu_tanh"}}],
    },
    layers="n_layer",
    required=("vocab_size", "hidden_size", "n_layer", "n_head"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        Copy("n_head", "layers.*.mixer.heads"),
        Copy("layer_norm_epsilon", *EPS),
        Copy("hidden_dropout", "layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("tie_word_embeddings", "head.tied"),
        Copy("initializer_range", "init.spread"),
    ),
    fixed={"apply_residual_connection_post_layernorm": False, "pretraining_tp": 1},
    tensors=(
        Row("word_embeddings.weight", "embed.table"),
        *rows("word_embeddings_layernorm", "embed_norm", *LAYERNORM),
        *rows("h.{}.input_layernorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("h.{}.self_attention.query_key_value", "layers.{}.mixer.qkv"),
        *rows("h.{}.self_attention.dense", "layers.{}.mixer.o"),
        *rows("h.{}.post_attention_layernorm", "layers.{}.ffn_norm", *LAYERNORM),
        *rows("h.{}.mlp.dense_h_to_4h", "layers.{}.ffn.up"),
        *rows("h.{}.mlp.dense_4h_to_h", "layers.{}.ffn.down"),
        *rows("ln_f", "norm", *LAYERNORM),
    ),
    ignored=HOUSEKEEPING
    | {"slow_but_exact", "n_inner", "seq_length", "masked_softmax_fusion", "bias_dropout_fusion", "unk_token_id"}
    | {"offset_alibi", "attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv"},
)
