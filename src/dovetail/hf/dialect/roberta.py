"""RoBERTa: BERT whose positions start after the padding id, so the table's first rows are unused (Liu et al. 2019)."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.bert import BERT, HEAD_EPS, POSITION_IDS, TIED, classifiers, masked_lm, pooled
from dovetail.hf.field import Config, Field, Settings, value_at
from dovetail.hf.table import Form, Skip
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


def named(name: str) -> tuple[Form, ...]:
    """RoBERTa's model classes, also under the name of another family."""
    head = masked_lm("Roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight", HEAD_EPS, TIED)
    forms = pooled("Roberta", "pooler.dense"), head, *classifiers("Roberta", "tanh", "classifier.dense", "classifier.out_proj")
    return tuple(dc.replace(form, architecture=form.architecture.replace("Roberta", name)) for form in forms)


ROBERTA = BERT.variant(
    "roberta",
    forms=named("Roberta"),
    spec={"position": {"kind": "learned", "length": 512, "offset": 2}},
    fields=(PositionTable(),),
    defaults={"pad_token_id": 1, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1},
    copies={"lm_head.decoder.bias": "head.bias"},
    skips=(POSITION_IDS, Skip("roberta.pooler.*", "a pooler that this model class does not use")),
)
