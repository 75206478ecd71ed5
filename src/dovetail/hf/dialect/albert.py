"""ALBERT: BERT whose layers all use the weights of the first, behind embeddings of a width of their own (Lan et al. 2019).

Their ffn has no dropout of its own; ours has that of the mixer. Released models have none.
"""

from __future__ import annotations

from dovetail.base.limits import CONFIG_LAYERS
from dovetail.hf.classes import Classes
from dovetail.hf.dialect.bert import BERT, HEAD_ACT, HEAD_EPS, POSITION_IDS, TIED, classifiers, masked_lm, pooled
from dovetail.hf.field import Config, Copy, Field, Settings
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Row, Skip, rows

LAYERS, DROPOUT, THEIRS = "num_hidden_layers", "classifier_dropout_prob", "encoder.albert_layer_groups.0.albert_layers.0"
OLD_FIELDS = {"down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"}  # of the original code
CLASSIFIER = (Classes(), Copy(DROPOUT, "head.dropout"))


class OneGroup(Field):
    """All layers are one group, which has one layer. A spec whose layers have weights of their own is not what is read back."""

    names = (LAYERS,)

    def from_hf(self, config: Config) -> Settings:
        count = config.get(LAYERS)
        return {f"layers.{i}.shares": 0 for i in range(1, min(count, CONFIG_LAYERS))} if isinstance(count, int) else {}


ALBERT = Dialect(
    name="albert",
    forms=(
        pooled("Albert", "pooler"),
        masked_lm(
            "Albert",
            "predictions.dense",
            "predictions.LayerNorm",
            "predictions.bias",
            "predictions.decoder.weight",
            *(HEAD_EPS, HEAD_ACT, TIED),
        ),
        *classifiers("Albert", "tanh", "albert.pooler", "classifier", CLASSIFIER),
    ),
    spec={**BERT.spec, "embed": {"kind": "tokens", "types": 2, "width": 128}},
    layers=LAYERS,
    required=(*BERT.required, "embedding_size"),
    fields=(*BERT.fields, Copy("embedding_size", "embed.width"), OneGroup()),
    defaults={
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        DROPOUT: 0.1,
    },
    fixed={"num_hidden_groups": 1, "inner_group_num": 1, "position_embedding_type": "absolute"},
    ignored=HOUSEKEEPING | OLD_FIELDS | {"tie_word_embeddings", DROPOUT},
    tensors=(
        Row("embeddings.word_embeddings.weight", "embed.table"),
        Row("embeddings.token_type_embeddings.weight", "embed.type_table"),
        Row("embeddings.position_embeddings.weight", "position.table"),
        *rows("embeddings.LayerNorm", "embed_norm", *LAYERNORM),
        *rows("encoder.embedding_hidden_mapping_in", "embed.project"),
        *rows(f"{THEIRS}.attention.query", "layers.0.mixer.q"),
        *rows(f"{THEIRS}.attention.key", "layers.0.mixer.k"),
        *rows(f"{THEIRS}.attention.value", "layers.0.mixer.v"),
        *rows(f"{THEIRS}.attention.dense", "layers.0.mixer.o"),
        *rows(f"{THEIRS}.attention.LayerNorm", "layers.0.mixer_norm", *LAYERNORM),
        *rows(f"{THEIRS}.ffn", "layers.0.ffn.up"),
        *rows(f"{THEIRS}.ffn_output", "layers.0.ffn.down"),
        *rows(f"{THEIRS}.full_layer_layer_norm", "layers.0.ffn_norm", *LAYERNORM),
    ),
    limits=BERT.limits,
    copies={"predictions.decoder.bias": "head.bias"},
    skips=(
        POSITION_IDS,
        Skip("albert.pooler.*", "a pooler that this model class does not use"),
        Skip("sop_classifier.*", "the head for sentence-order prediction"),
    ),
)
