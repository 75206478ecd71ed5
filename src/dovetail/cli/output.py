"""Output of the verbs: JSON that every parser reads."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(data: Any, indent: int | None = None) -> str:
    """Return the data as standard JSON in ASCII. It has no NaN and no infinity: they become strings ("nan", "inf")."""
    return json.dumps(_standard(data), indent=indent, allow_nan=False)


def print_json(data: Any, indent: int | None = None) -> None:
    """Print the data as JSON on stdout."""
    print(to_json(data, indent))


def _standard(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _standard(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_standard(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
