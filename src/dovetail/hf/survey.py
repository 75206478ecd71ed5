"""The families that can be read and written, and the number of lines each took."""

from __future__ import annotations

import dataclasses as dc
import inspect
from importlib import import_module
from itertools import zip_longest

from dovetail.hf import dialect as package
from dovetail.hf.dialect import DIALECTS, FILES

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
