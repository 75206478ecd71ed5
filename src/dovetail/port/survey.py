"""What families there are, and how much each took: one row a family, found in its file rather than listed a second time."""

from __future__ import annotations

import ast
import dataclasses as dc
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from dovetail.port import dialect as families
from dovetail.port.dialect import DIALECTS
from dovetail.port.table import Dialect

HELD_TO = "5.22.2"  # the version of transformers whose models ours are compared with in tests/parity


@dc.dataclass(frozen=True)
class Family:
    """One family that can be read and written."""

    model_type: str
    architectures: tuple[str, ...]
    lines: int  # of the file of its dialect
    transformers: str = HELD_TO

    def data(self) -> dict[str, object]:
        """The row for machines. A dialect is one table for both ways, so whoever is there can be read and written."""
        row = dc.asdict(self)
        return {"model_type": row.pop("model_type"), "import": True, "export": True, **row}


def survey() -> list[Family]:
    """Every family, in the order in which they are tried."""
    lines = {made.name: count for module in _modules() for made, count in _defined(module)}
    return [Family(name, tuple(form.architecture for form in d.forms), lines[name]) for name, d in DIALECTS.items()]


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"{families.__name__}.{info.name}") for info in pkgutil.iter_modules(families.__path__)]


def _defined(module: ModuleType) -> list[tuple[Dialect, int]]:
    """The dialects that a file defines, rather than borrows from another; and its lines."""
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    made = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                value = getattr(module, target.id) if isinstance(target, ast.Name) else None
                if isinstance(value, Dialect):
                    made.append((value, len(text.splitlines())))
    return made
