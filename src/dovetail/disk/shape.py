"""Check that data from a file has the types that its reader expects.

    check_shape(data, {"numbers": {str: NUMBER}, "files": {str: {"bytes": int, "sha256": str}}}, where)

A pattern is a type (an `int` is no bool, a `float` may be a whole number), a list of one pattern, a mapping from names, or from
`str` for any name, to patterns, or a tuple of alternatives. A name that ends in `?` may be missing; other keys are not checked.

SHA-256 of files, and of plain data.

{"a": 1, …}  ->  canonical JSON (sorted keys, no spaces, no NaN)  ->  SHA-256
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.disk.untrusted import open_regular

NUMBER = float
WORDS = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false", type(None): "null"}


def check_shape(data: Any, pattern: Any, where: str) -> None:
    """Raise FileError, with the path of the value, where the data does not have the types of the pattern."""
    problem = _problem(data, pattern, "")
    if problem is not None:
        raise FileError(f"{where}: {problem}; was it edited?")


def _problem(data: Any, pattern: Any, path: str) -> str | None:
    if isinstance(pattern, tuple):
        problems = [_problem(data, one, path) for one in pattern]
        return None if None in problems else problems[0]
    if isinstance(pattern, Mapping):
        return _problem_of_mapping(data, pattern, path)
    if isinstance(pattern, list):
        if not isinstance(data, list):
            return f"{path or 'it'} is {_shown(data)}, not a list"
        return next((p for i, one in enumerate(data) if (p := _problem(one, pattern[0], _join(path, i)))), None)
    if pattern is object or _is(data, pattern):
        return None
    return f"{path or 'it'} is {_shown(data)}, not {WORDS[pattern]}"


def _problem_of_mapping(data: Any, pattern: Mapping[Any, Any], path: str) -> str | None:
    if not isinstance(data, Mapping):
        return f"{path or 'it'} is {_shown(data)}, not a mapping"
    if str in pattern:
        if other := next((key for key in data if not isinstance(key, str)), None):
            return f"{path or 'it'} has the key {_shown(other)}, not a string"
        return next((p for key, one in data.items() if (p := _problem(one, pattern[str], _join(path, key)))), None)
    for name, one in pattern.items():
        key = name.removesuffix("?")
        if key not in data:
            if name == key:
                return f"{_join(path, key)} is missing"
        elif problem := _problem(data[key], one, _join(path, key)):
            return problem
    return None


def _is(data: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
    return type(data) is kind


def _join(path: str, name: object) -> str:
    return f"{path}.{str(name)[:80]}" if path else str(name)[:80]


def _shown(data: Any) -> str:
    return repr(data)[:60]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with os.fdopen(open_regular(path, path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_sha256(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
