"""A config that leaves a field out means what the reference's config class means: every field of every family, left out.

The reference fills in the default, its full config is read, and the spec must equal the one read from the shorter config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from quick import DEEPER, FAMILIES
from transformers import AutoConfig

from dovetail.base.errors import DovetailError
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import from_hf
from dovetail.hf.resolved import differences, explicit
from dovetail.hf.table import Dialect, Form
from dovetail.model.model import Model

Fields = dict[str, Any]
DEPTH = 8  # Jamba's first attention is its fifth layer, the first full attention of Gemma 3 is its sixth
# names of the width and of the numbers of heads; twice as many heads as by default show a default number of KV heads
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
SIZES = (*HEADS, "hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim")
# T5's class always claims a tied table; its loader unties one that the checkpoint holds apart
UNTRUE = {"t5": ("tie_word_embeddings",), "mt5": ("tie_word_embeddings",)}


def complete(name: str, fields: Fields) -> Fields:
    """The reference's config with every field it has."""
    return {**AutoConfig.for_model(name, **copy.deepcopy(fields)).to_dict(), "model_type": name}


def bases(dialect: Dialect) -> Iterator[Fields]:
    """The reference's default config with few layers, and one of twice its width and heads."""
    depth = {field: DEEPER.get(dialect.name, DEPTH) for field in (dialect.layers, dialect.encoder) if field is not None}
    base = complete(dialect.name, depth)
    yield base
    try:
        yield complete(dialect.name, {**depth, **{field: 2 * base[field] for field in SIZES if type(base.get(field)) is int}})
    except Exception:  # the reference refuses this size for some families
        return


def shorter(dialect: Dialect, form: Form, base: Fields) -> Iterator[tuple[str, Fields]]:
    """(the field left out, the config without it), also for fields of mappings such as rope_parameters. A form after the
    first is asked for its own fields alone."""
    names = {name for field in form.fields for name in field.names}
    if form is dialect.forms[0]:
        names |= {dialect.layers, dialect.encoder or "", *dialect.fixed, *dialect.aliases}
        names |= {name for field in dialect.fields for name in field.names}
    for field in sorted(names & base.keys()):
        yield field, {name: value for name, value in base.items() if name != field}
        yield f"{field} = null", {**base, field: None}
        if isinstance(base[field], dict) and field != "id2label":
            for inner in base[field]:
                yield f"{field}.{inner}", {**base, field: {k: v for k, v in base[field].items() if k != inner}}


def filled(name: str, config: Fields) -> Model | None:
    """The spec of the reference's config with its defaults filled in; None where the reference or its config is refused."""
    try:
        full = complete(name, {field: value for field, value in config.items() if field != "model_type"})
        kept = {field: config[field] for field in ("architectures", *UNTRUE.get(name, ())) if field in config}
        return from_hf({**full, **kept})
    except Exception:  # the reference raises errors of many types
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_left_out_means_the_reference_s_default(name: str) -> None:
    dialect, compared, wrong = DIALECTS[name], 0, []
    for base in bases(dialect):
        for form in dialect.forms:
            for field, config in shorter(dialect, form, {**base, "architectures": [form.architecture]}):
                wanted = filled(name, config)
                if wanted is None:
                    continue
                try:
                    spec = from_hf(config)
                except DovetailError as error:  # to refuse is not silently wrong; but a field may be left out
                    wrong += [f"{field}: {error}"] if "=" not in field and "is missing" not in str(error) else []
                    continue
                compared += 1
                found = differences(explicit(wanted), explicit(spec))
                wrong += [f"{field}: {path} is {ours}, not {theirs}" for path, theirs, ours in list(found)[:1]]
    assert not wrong, "\n".join(wrong)
    assert compared >= 5
