"""The families that can be read and written, and the number of lines each took; and a typical spec of a family, from its
dialect alone: required config fields of the family's own spec, all others left out.
"""

from __future__ import annotations

import dataclasses as dc
import inspect
from importlib import import_module
from itertools import zip_longest

from dovetail.core.errors import SpecError
from dovetail.hf import dialect as package
from dovetail.hf.check import written
from dovetail.hf.dialect import DIALECTS, FILES
from dovetail.hf.hf import from_hf
from dovetail.hf.table import Dialect, Form
from dovetail.model import Model

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
