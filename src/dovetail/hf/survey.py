"""The families that can be read and written, and the number of lines each took; and a typical spec of a family, from its
dialect alone: required config fields of the family's own spec, all others left out.
"""

from __future__ import annotations

import dataclasses as dc
import inspect
from collections.abc import Mapping
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_BYTES
from dovetail.disk.untrusted import Directory, exists
from dovetail.hf import dialect as package
from dovetail.hf.check import written
from dovetail.hf.config import base_spec
from dovetail.hf.dialect import DIALECTS, FILES
from dovetail.hf.hf import from_hf
from dovetail.hf.origin import origin
from dovetail.hf.peaked import predicts_tokens
from dovetail.hf.quantized import split_quantization
from dovetail.hf.table import Dialect, Form
from dovetail.model.model import Model

REFERENCE_VERSION = "5.22.2"  # the version of transformers whose models ours are compared with in tests/parity


@dc.dataclass(frozen=True)
class Family:
    """One family that can be read and written."""

    model_type: str
    architectures: tuple[str, ...]
    lines: int | None  # of the file of its dialect; None for a dialect of another package
    transformers: str | None  # the version it is compared with in tests/parity; None for a dialect of another package

    def data(self) -> dict[str, object]:
        """The row as plain data. A dialect is one table for both directions, so every family can be read and written."""
        row = dc.asdict(self)
        return {"model_type": row.pop("model_type"), "import": True, "export": True, **row}


def survey() -> list[Family]:
    """Every family, in the order in which they are tried."""
    lines = [len(inspect.getsource(import_module(f"{package.__name__}.{file}")).splitlines()) for file in FILES]
    rows = zip_longest(DIALECTS.items(), lines)  # dialects of other packages come last
    return [
        Family(name, tuple(form.architecture for form in dialect.forms), count, None if count is None else REFERENCE_VERSION)
        for (name, dialect), count in rows
    ]


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


def typical(name: str) -> Model:
    """The spec of a family, as its language model if it has one."""
    dialect = DIALECTS[name]
    forms = [form for form in dialect.forms if predicts_tokens(base_spec(dialect, form))]
    return family_spec(dialect, (forms or dialect.forms)[0])


def family_source(model: object) -> tuple[Model, str | None] | None:
    """The spec of a config, a model type or a model directory, and the family it is from; None for anything else."""
    if isinstance(model, Mapping):
        config = cast(Mapping[str, Any], model)
        return from_hf(split_quantization(config)[0]), str(config.get("model_type"))
    if isinstance(model, (str, Path)):
        path = Path(model)
        if str(model) in DIALECTS and not exists(path):
            return typical(str(model)), str(model)
        if path.suffix == ".json":
            return family_source(Directory(path.parent).json(path.name, CONFIG_BYTES))
        if path.is_dir():
            spec, config = origin(Directory(path))
            return spec, None if config is None else str(config.get("model_type"))
    return None
