"""RoBERTa: BERT whose positions start after the padding id, so the table's first rows are unused (Liu et al. 2019)."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.classes import classified
from dovetail.hf.dialect.bert import BERT, CLASSIFIER, NORM, POOLER, POSITION_IDS, TIED
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.table import LAYERNORM, Form, Row, Skip, rows
from dovetail.model.model import Model

PAD, LENGTH = "pad_token_id", "max_position_embeddings"


class PositionTable(Field):
    """A position table whose first pad_token_id + 1 rows are unused."""

    names = (PAD, LENGTH)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        offset, length = value_at(spec, "position.offset"), value_at(spec, "position.length")
        both = isinstance(offset, int) and isinstance(length, int)
        return {PAD: offset - 1, LENGTH: length + offset} if both and offset > 0 else {}

    def from_hf(self, config: Config) -> Settings:
        pad, length = _whole(config, PAD), _whole(config, LENGTH)
        return {"position.offset": pad + 1, "position.length": length - pad - 1}


def _whole(config: Config, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 0:
        raise SpecError(f"config.{name}", f"{value!r} is not a whole number from 0")
    return value


ROBERTA = BERT.variant(
    "roberta",
    forms=(
        Form(
            architecture="RobertaModel",
            auto="AutoModel",
            answer="pooler_output",
            head={"head": {"kind": "pooled_embedding", "pooling": "first", "dense": True}},
            tensors=POOLER,
        ),
        Form(
            architecture="RobertaForMaskedLM",
            auto="AutoModelForMaskedLM",
            head={"head": {"kind": "masked_lm", "norm": NORM}},
            prefix="roberta.",
            tensors=(
                *rows("lm_head.dense", "head.dense", "weight", "bias"),
                *rows("lm_head.layer_norm", "head.norm", *LAYERNORM),
                Row("lm_head.bias", "head.bias"),
                Row("lm_head.decoder.weight", "head.out.weight"),
            ),
            fields=(Copy("layer_norm_eps", "head.norm.eps"), TIED),
        ),
        classified(
            "Roberta",
            "Sequence",
            "roberta.",
            {"kind": "classifier", "act": "tanh"},
            (
                *rows("classifier.dense", "head.dense", "weight", "bias"),
                *rows("classifier.out_proj", "head.out", "weight", "bias"),
            ),
            CLASSIFIER,
        ),
        classified(
            "Roberta", "Token", "roberta.", "token_classifier", rows("classifier", "head.out", "weight", "bias"), CLASSIFIER
        ),
    ),
    spec={"position": {"kind": "learned", "length": 512, "offset": 2}},
    fields=(PositionTable(),),
    defaults={"pad_token_id": 1, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1},
    copies={"lm_head.decoder.bias": "head.bias"},
    skips=(POSITION_IDS, Skip("roberta.pooler.*", "a pooler that this model class does not use")),
)


def named(prefix: str) -> tuple[Form, ...]:
    """RoBERTa's model classes under the name of another family."""
    return tuple(dc.replace(form, architecture=form.architecture.replace("Roberta", prefix)) for form in ROBERTA.forms)
