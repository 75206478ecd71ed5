"""BERT: a post-LayerNorm encoder with learned positions and token types (Devlin et al. 2018)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.classes import Classes, Fallback, classified
from dovetail.hf.field import ACTIVATIONS, Choice, Copy, Field, Implied, value_at
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows
from dovetail.model.model import Model

NORM = {"kind": "layernorm", "eps": 1e-12}
MIXER = {"kind": "attention", "mask": "full", "position": "none", "bias": True, "out_bias": True, "dropout": 0.1}
LAYER = {"wire": {"kind": "post_norm", "dropout": 0.1}, "norm": NORM, "mixer": MIXER, "ffn": {"kind": "mlp", "act": "gelu"}}
# unused descriptions of a pooler
POOLER_FIELDS = {f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")}
CLASSIFIER = (Classes(), Fallback("classifier_dropout", "hidden_dropout_prob", "head.dropout"))
# the output table is always the embedding's
TIED = Implied("tie_word_embeddings", "head.tied", by=lambda config: True)
HEAD_EPS, HEAD_ACT = Copy("layer_norm_eps", "head.norm.eps"), Choice("hidden_act", "head.act", ACTIVATIONS)


def _types(spec: Model) -> tuple[str, Any, str] | None:
    """Their model needs at least one token type."""
    return ("embed.types", 0, "there is at least 1") if value_at(spec, "embed.types") == 0 else None


NEXT_SENTENCE = "BertForNextSentencePrediction"
INSTEAD = "to import it instead, write {} under architectures in config.json"
POSITION_IDS = Skip("*embeddings.position_ids", "the numbers 0, 1, 2 …")


def pooled(name: str, pooler: str) -> Form:
    """The class that returns the vector of the first token, through the dense layer of a pooler."""
    head = {"kind": "pooled_embedding", "pooling": "first", "dense": True}
    return Form(
        architecture=f"{name}Model",
        auto="AutoModel",
        answer="pooler_output",
        head={"head": head},
        tensors=rows(pooler, "head.out"),
    )


def masked_lm(name: str, dense: str, norm: str, bias: str, table: str, *fields: Field) -> Form:
    """The class that predicts masked tokens: names of its dense layer and norm, of the output bias and table."""
    return Form(
        architecture=f"{name}ForMaskedLM",
        auto="AutoModelForMaskedLM",
        head={"head": {"kind": "masked_lm", "norm": NORM}},
        prefix=f"{name.lower()}.",
        tensors=(
            *rows(dense, "head.dense"),
            *rows(norm, "head.norm", *LAYERNORM),
            Row(bias, "head.bias"),
            Row(table, "head.out.weight"),
        ),
        fields=fields,
    )


def classifiers(name: str, act: str, dense: str, out: str, fields: tuple[Field, ...] = CLASSIFIER) -> tuple[Form, Form]:
    """The classes that classify sequences, by a dense layer and an output, and tokens."""
    head, prefix = {"kind": "classifier", "act": act}, f"{name.lower()}."
    return (
        classified(name, "Sequence", prefix, head, (*rows(dense, "head.dense"), *rows(out, "head.out")), fields),
        classified(name, "Token", prefix, "token_classifier", rows("classifier", "head.out"), fields),
    )


BERT = Dialect(
    name="bert",
    forms=(
        pooled("Bert", "pooler.dense"),
        masked_lm(
            "Bert",
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            "cls.predictions.decoder.weight",
            *(HEAD_EPS, HEAD_ACT, TIED),
        ),
        Form(
            architecture=NEXT_SENTENCE,
            auto="AutoModelForNextSentencePrediction",
            head={"head": "next_sentence"},
            prefix="bert.",
            tensors=(
                *rows("bert.pooler.dense", "head.dense"),
                *rows("cls.seq_relationship", "head.out"),
            ),
            skips=(Skip("cls.predictions.*", f"the head for masked tokens; {INSTEAD.format('BertForMaskedLM')}"),),
        ),
        *classifiers("Bert", "tanh", "bert.pooler.dense", "classifier"),
    ),
    refused={
        "BertForPreTraining": "it has two heads, and a model one; write BertForMaskedLM or "
        f"{NEXT_SENTENCE} there: the other head is then not imported, and reported"
    },
    spec={
        "embed": {"kind": "tokens", "types": 2},
        "position": {"kind": "learned", "length": 512},
        "embed_norm": NORM,
        "dropout": 0.1,
        "layers": [LAYER],
        "norm": None,
        "init": {"kind": "normal", "residual": False},
    },
    fields=(
        Copy("vocab_size", "vocab"),
        Copy("hidden_size", "width"),
        Copy("type_vocab_size", "embed.types"),
        Copy("max_position_embeddings", "position.length"),
        Copy("intermediate_size", "layers.*.ffn.hidden"),
        Copy("num_attention_heads", "layers.*.mixer.heads"),
        Copy("layer_norm_eps", "embed_norm.eps", "layers.*.norm.eps"),
        Copy("hidden_dropout_prob", "dropout", "layers.*.wire.dropout"),
        Copy("attention_probs_dropout_prob", "layers.*.mixer.dropout"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
    ),
    defaults={"hidden_dropout_prob": 0.1},
    fixed={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    ignored=HOUSEKEEPING | {"classifier_dropout", "directionality", "tie_word_embeddings", *POOLER_FIELDS},
    tensors=(
        Row("embeddings.word_embeddings.weight", "embed.table"),
        Row("embeddings.token_type_embeddings.weight", "embed.type_table"),
        Row("embeddings.position_embeddings.weight", "position.table"),
        *rows("embeddings.LayerNorm", "embed_norm", *LAYERNORM),
        *rows("encoder.layer.{}.attention.self.query", "layers.{}.mixer.q"),
        *rows("encoder.layer.{}.attention.self.key", "layers.{}.mixer.k"),
        *rows("encoder.layer.{}.attention.self.value", "layers.{}.mixer.v"),
        *rows("encoder.layer.{}.attention.output.dense", "layers.{}.mixer.o"),
        *rows("encoder.layer.{}.attention.output.LayerNorm", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("encoder.layer.{}.intermediate.dense", "layers.{}.ffn.up"),
        *rows("encoder.layer.{}.output.dense", "layers.{}.ffn.down"),
        *rows("encoder.layer.{}.output.LayerNorm", "layers.{}.ffn_norm", *LAYERNORM),
    ),
    limits=(_types,),
    legacy_suffixes={".gamma": ".weight", ".beta": ".bias"},
    copies={"cls.predictions.decoder.bias": "head.bias"},
    skips=(
        POSITION_IDS,
        Skip("bert.pooler.*", "a pooler that this model class does not use"),
        Skip("cls.seq_relationship.*", f"the head for next-sentence prediction; {INSTEAD.format(NEXT_SENTENCE)}"),
    ),
)
