"""ELECTRA: BERT whose embeddings may be narrower than the model, and are projected behind their norm (Clark et al. 2020)."""

from __future__ import annotations

from typing import Any

from dovetail.hf.dialect.bert import BERT, HEAD_EPS, POSITION_IDS, TIED, classifiers, masked_lm
from dovetail.hf.field import Config, Field, Settings, value_at
from dovetail.hf.table import Form, rows
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
        masked_lm(
            "Electra",
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head.bias",
            "generator_lm_head.weight",
            *(HEAD_EPS, TIED),
        ),
        *classifiers("Electra", "gelu", "classifier.dense", "classifier.out_proj"),
    ),
    fields=(EmbeddingSize(),),
    tensors=rows("embeddings_project", "embed.project"),
    defaults={"hidden_dropout_prob": 0.1, "embedding_size": 128},
    ignored=tuple(f"summary_{name}" for name in ("activation", "last_dropout", "type", "use_proj")),
    copies={},
    skips=(POSITION_IDS,),
)
