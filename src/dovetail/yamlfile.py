"""YAML in and out, safely and without torch: a syntax error is answered in the time it takes to start Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dovetail.core.errors import FileError, SpecError

LARGEST = 4 * 2**20  # bytes of a spec: no real one comes near


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
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise SpecError(where, "YAML aliases are not read here", "write the part out")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(
            f"{where}{line}", f"not YAML: {getattr(error, 'problem', error)}", "check quotes, colons and indentation"
        ) from error
    except RecursionError as error:
        raise SpecError(where, "nested too deeply") from error


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, in the order given; short lists and mappings on one line."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
