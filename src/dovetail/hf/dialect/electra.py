"""ELECTRA: BERT whose embeddings may be narrower than the model, and are projected behind their norm (Clark et al. 2020)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.classes import classified
from dovetail.hf.dialect.bert import BERT, CLASSIFIER, NORM, POSITION_IDS, TIED
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.table import LAYERNORM, Form, Row, rows
from dovetail.model.model import Model


class EmbeddingSize(Field):
    """The width of the embeddings; without a projection where it is that of the model."""

    names = ("embedding_size",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {"embedding_size": value_at(spec, "embed:tokens.width") or spec.width}

    def from_hf(self, config: Config) -> Settings:
        size = config.get("embedding_size")
        return {"embed.width": None if size == config.get("hidden_size") else size}


ELECTRA = BERT.variant(
    "electra",
    forms=(
        Form(architecture="ElectraModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
        Form(
            architecture="ElectraForMaskedLM",
            auto="AutoModelForMaskedLM",
            head={"head": {"kind": "masked_lm", "norm": NORM}},
            prefix="electra.",
            tensors=(
                *rows("generator_predictions.dense", "head.dense", "weight", "bias"),
                *rows("generator_predictions.LayerNorm", "head.norm", *LAYERNORM),
                Row("generator_lm_head.bias", "head.bias"),
                Row("generator_lm_head.weight", "head.out.weight"),
            ),
            fields=(Copy("layer_norm_eps", "head.norm.eps"), TIED),
        ),
        classified(
            "Electra",
            "Sequence",
            "electra.",
            {"kind": "classifier", "act": "gelu"},
            (
                *rows("classifier.dense", "head.dense", "weight", "bias"),
                *rows("classifier.out_proj", "head.out", "weight", "bias"),
            ),
            CLASSIFIER,
        ),
        classified(
            "Electra", "Token", "electra.", "token_classifier", rows("classifier", "head.out", "weight", "bias"), CLASSIFIER
        ),
    ),
    fields=(EmbeddingSize(),),
    tensors=rows("embeddings_project", "embed.project", "weight", "bias"),
    defaults={"hidden_dropout_prob": 0.1, "embedding_size": 128},
    ignored=tuple(f"summary_{name}" for name in ("activation", "last_dropout", "type", "use_proj")),
    copies={},
    skips=(POSITION_IDS,),
)
