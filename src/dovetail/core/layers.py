"""Many layers written once: `repeat` and `pattern` in a list of layers, and back.

- repeat: 6
  pattern: [local, full]        local, full, local, full, local, full
  local: …
  full: …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.core.part import Part


def expand(layers: Any) -> list[Any]:
    """`repeat` and `pattern` written out: one mapping a layer."""
    if not isinstance(layers, list):
        raise SpecError("layers", f"a list of layers was expected, not {layers!r}")
    out: list[Any] = []
    for i, entry in enumerate(layers):
        if not isinstance(entry, Mapping):
            raise SpecError(f"layers.{i}", f"a mapping was expected, not {entry!r}")
        pattern = entry.get("pattern", [None])
        if not isinstance(pattern, list) or not all(isinstance(name, str) for name in pattern if name is not None):
            raise SpecError(f"layers.{i}.pattern", f"a list of names was expected, not {pattern!r}")
        repeat = entry.get("repeat", len(pattern))
        if type(repeat) is not int or not 1 <= repeat <= 10_000:
            raise SpecError(f"layers.{i}.repeat", f"{repeat!r} is not a whole number from 1 to 10000")
        names = {name for name in pattern if name is not None}
        if missing := sorted(names - set(entry)):
            raise SpecError(
                f"layers.{i}.pattern", f"{missing[0]!r} is not described", f"add `{missing[0]}:` beside the pattern"
            )
        for name in names:
            if not isinstance(entry[name], Mapping):
                raise SpecError(f"layers.{i}.{name}", f"a mapping was expected, not {entry[name]!r}")
        common = {k: v for k, v in entry.items() if k not in {"repeat", "pattern", *names}}
        for layer in range(repeat):
            own = entry.get(pattern[layer % len(pattern)], {}) if names else {}
            out.append({"kind": "block", **common, **own})
    return out


def fold(layers: Sequence[Part]) -> list[Any]:
    """Equal neighbors written once with a `repeat`."""
    out: list[Any] = []
    previous: Part | None = None
    for block in layers:
        if block == previous:
            out[-1]["repeat"] += 1
        else:
            out.append({"repeat": 1, **block.changed()})
        previous = block
    return [
        entry if entry["repeat"] > 1 else {k: v for k, v in entry.items() if k != "repeat"} or {"repeat": 1} for entry in out
    ]
