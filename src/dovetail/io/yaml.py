"""YAML in and out, safely and without torch: a syntax error is answered in the time it takes to start Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dovetail.core.errors import FileError, SpecError

LARGEST = 4 * 2**20  # bytes of a spec: no real one comes near
DEEPEST = 100  # collections inside each other; the parser's time grows with the square of it


def read_text(path: Path) -> str:
    """A text file of bounded size."""
    try:
        if path.stat().st_size > LARGEST:
            raise FileError(f"{path}: is larger than {LARGEST} bytes; that is no spec")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read ({error})") from error


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML; no tags, no aliases that blow up."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise SpecError(where, "YAML aliases are not read here", "write the part out")
            if depth > DEEPEST:
                raise SpecError(where, "nested too deeply", f"{DEEPEST} levels are read")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(
            f"{where}{line}", f"not YAML: {getattr(error, 'problem', error)}", "check quotes, colons and indentation"
        ) from error


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, in the order given; short lists and mappings on one line."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
