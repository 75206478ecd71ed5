"""BART: a post-norm encoder–decoder with learned positions whose first two rows are unused (Lewis et al. 2019)."""

from __future__ import annotations

from dovetail.hf.convert import Unsqueeze
from dovetail.hf.field import ACTIVATIONS, Choice, Copy
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows

MIXER = {"kind": "attention", "position": "none", "bias": True, "out_bias": True}
ENCODER_LAYER = {
    "wire": {"kind": "post_norm", "dropout": 0.1},
    "norm": "layernorm",
    "mixer": {**MIXER, "mask": "full"},
    "ffn": {"kind": "mlp", "act": "gelu"},
}
LAYER = {**ENCODER_LAYER, "mixer": MIXER, "cross": {**MIXER, "kind": "cross_attention"}}
STREAM = {"position": {"kind": "learned", "length": 1024, "offset": 2}, "embed_norm": "layernorm", "dropout": 0.1, "norm": None}

NEITHER = {"add_final_layer_norm": False, "static_position_embeddings": False}
# of older files: their only values are those that are fixed below
OLD = {"add_bias_logits", "extra_pos_embeddings", "force_bos_token_to_be_generated", "normalize_embedding", "num_hidden_layers"}


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    """Rows of q, k, v and o with biases."""
    named = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    return tuple(row for name, mine in named.items() for row in rows(f"{theirs}.{name}", f"{ours}.{mine}"))


def stack(theirs: str, ours: str) -> tuple[Row, ...]:
    """Rows that encoder and decoder share."""
    return (
        Row(f"{theirs}.embed_positions.weight", f"{ours}position.table"),
        *rows(f"{theirs}.layernorm_embedding", f"{ours}embed_norm", *LAYERNORM),
        *attention(f"{theirs}.layers.{{}}.self_attn", f"{ours}layers.{{}}.mixer"),
        *rows(f"{theirs}.layers.{{}}.self_attn_layer_norm", f"{ours}layers.{{}}.mixer_norm", *LAYERNORM),
        *rows(f"{theirs}.layers.{{}}.fc1", f"{ours}layers.{{}}.ffn.up"),
        *rows(f"{theirs}.layers.{{}}.fc2", f"{ours}layers.{{}}.ffn.down"),
        *rows(f"{theirs}.layers.{{}}.final_layer_norm", f"{ours}layers.{{}}.ffn_norm", *LAYERNORM),
    )


BART = Dialect(
    name="bart",
    forms=(
        Form(architecture="BartModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
        Form(
            architecture="BartForConditionalGeneration",
            auto="AutoModelForSeq2SeqLM",
            head={"head": {"kind": "lm", "bias": True}},
            prefix="model.",
            tensors=(
                Row("lm_head.weight", "head.out.weight"),
                Row("final_logits_bias", "head.bias", convert=Unsqueeze(0)),
            ),
        ),
    ),
    spec={
        **STREAM,
        "encoder": {**STREAM, "embed": {"kind": "tokens", "shared": True}, "layers": [ENCODER_LAYER], "head": None},
        "layers": [LAYER],
        "init": {"kind": "normal", "residual": False},
    },
    layers="decoder_layers",
    encoder="encoder_layers",
    required=(
        "vocab_size",
        "d_model",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    fields=(
        Copy("vocab_size", "vocab", "encoder.vocab"),
        Copy("d_model", "width", "encoder.width"),
        Copy("max_position_embeddings", "position.length", "encoder.position.length"),
        Copy("scale_embedding", "embed.scale_by_width", "encoder.embed.scale_by_width"),
        Copy("encoder_attention_heads", "encoder.layers.*.mixer.heads"),
        Copy("decoder_attention_heads", "layers.*.mixer.heads", "layers.*.cross.heads"),
        Copy("encoder_ffn_dim", "encoder.layers.*.ffn.hidden"),
        Copy("decoder_ffn_dim", "layers.*.ffn.hidden"),
        Copy("dropout", "dropout", "encoder.dropout", "layers.*.wire.dropout", "encoder.layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout", "layers.*.cross.dropout", "encoder.layers.*.mixer.dropout"),
        Copy("activation_dropout", "layers.*.ffn.dropout", "encoder.layers.*.ffn.dropout"),
        Copy("init_std", "init.spread", "encoder.init.spread"),
        Choice("activation_function", "layers.*.ffn.act", ACTIVATIONS),
        Choice("activation_function", "encoder.layers.*.ffn.act", ACTIVATIONS),
    ),
    defaults={"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
    fixed={"is_decoder": False, "tie_word_embeddings": True, "normalize_before": False, **NEITHER},
    ignored=HOUSEKEEPING | {"classif_dropout", "classifier_dropout", "encoder_layerdrop", "decoder_layerdrop", *OLD},
    tensors=(
        Row("shared.weight", "embed.table"),
        Row("encoder.embed_tokens.weight", "encoder.embed.table"),
        *stack("encoder", "encoder."),
        *stack("decoder", ""),
        *attention("decoder.layers.{}.encoder_attn", "layers.{}.cross"),
        *rows("decoder.layers.{}.encoder_attn_layer_norm", "layers.{}.cross_norm", *LAYERNORM),
    ),
    copies={"*decoder.embed_tokens.weight": "embed.table"},
    skips=(Skip("*coder.version", "the number of an older file format"),),
)
