"""A typical spec of a family, from its dialect alone: required config fields of the family's own spec, all others left out."""

from __future__ import annotations

from dovetail.core.errors import SpecError
from dovetail.hf.check import written
from dovetail.hf.hf import from_hf
from dovetail.hf.table import Dialect, Form
from dovetail.model import Model

DEPTH = 8  # the layers of most families repeat after at most eight


def family_spec(dialect: Dialect, form: Form) -> Model:
    """The spec of a config with the required fields alone, so that the others have the family's defaults; the family's own spec
    where these do not fit together."""
    config = written(dialect, form)
    needed = {*dialect.required, *form.required, "model_type", "architectures"}
    short = {name: value for name, value in config.items() if name in needed}
    for field in (dialect.layers, dialect.encoder):
        short |= {} if field is None else {field: DEPTH}
    try:
        return from_hf(short, dialect)
    except SpecError:
        return from_hf(config, dialect)
