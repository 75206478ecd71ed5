"""DistilBERT: BERT without token types, with its own tensor names (Sanh et al. 2019)."""

from __future__ import annotations

from dovetail.hf.classes import Classes, classified
from dovetail.hf.dialect.bert import LAYER, NORM, masked_lm
from dovetail.hf.field import ACTIVATIONS, Choice, Copy
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, rows

DISTILBERT = Dialect(
    name="distilbert",
    forms=(
        Form(architecture="DistilBertModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
        masked_lm(
            "DistilBert",
            "vocab_transform",
            "vocab_layer_norm",
            "vocab_projector.bias",
            "vocab_projector.weight",
            Choice("activation", "head.act", ACTIVATIONS),
            Copy("tie_word_embeddings", "head.tied"),
        ),
        classified(
            "DistilBert",
            "Sequence",
            "distilbert.",
            {"kind": "classifier", "act": "relu", "dropout": 0.2},
            (*rows("pre_classifier", "head.dense"), *rows("classifier", "head.out")),
            (Classes(), Copy("seq_classif_dropout", "head.dropout")),
        ),
        classified(
            "DistilBert",
            "Token",
            "distilbert.",
            {"kind": "token_classifier", "dropout": 0.1},
            rows("classifier", "head.out"),
            (Classes(), Copy("dropout", "head.dropout")),
        ),
    ),
    spec={
        "position": {"kind": "learned", "length": 512},
        "embed_norm": NORM,
        "dropout": 0.1,
        "layers": [LAYER],
        "norm": None,
        "init": {"kind": "normal", "residual": False},
    },
    layers="n_layers",
    required=("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads"),
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("dim", "width"),
        Copy("max_position_embeddings", "position.length"),
        Copy("hidden_dim", "layers.*.ffn.hidden"),
        Copy("n_heads", "layers.*.mixer.heads"),
        Copy("dropout", "dropout", "layers.*.wire.dropout"),
        Copy("attention_dropout", "layers.*.mixer.dropout"),
        Copy("initializer_range", "init.spread"),
        Choice("activation", "layers.*.ffn.act", ACTIVATIONS),
    ),
    fixed={"sinusoidal_pos_embds": False},
    ignored=HOUSEKEEPING | {"qa_dropout", "seq_classif_dropout", "tie_weights_", "tie_word_embeddings"},
    tensors=(
        Row("embeddings.word_embeddings.weight", "embed.table"),
        Row("embeddings.position_embeddings.weight", "position.table"),
        *rows("embeddings.LayerNorm", "embed_norm", *LAYERNORM),
        *rows("transformer.layer.{}.attention.q_lin", "layers.{}.mixer.q"),
        *rows("transformer.layer.{}.attention.k_lin", "layers.{}.mixer.k"),
        *rows("transformer.layer.{}.attention.v_lin", "layers.{}.mixer.v"),
        *rows("transformer.layer.{}.attention.out_lin", "layers.{}.mixer.o"),
        *rows("transformer.layer.{}.sa_layer_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("transformer.layer.{}.ffn.lin1", "layers.{}.ffn.up"),
        *rows("transformer.layer.{}.ffn.lin2", "layers.{}.ffn.down"),
        *rows("transformer.layer.{}.output_layer_norm", "layers.{}.ffn_norm", *LAYERNORM),
    ),
)
