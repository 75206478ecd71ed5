"""Short forms for layers in YAML: `repeat` and `pattern` expand to one mapping per layer; `fold` is the inverse.

- repeat: 6
  pattern: [local, full]        local, full, local, full, local, full
  local: …
  full: …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import SPEC_FIELDS, SPEC_LAYERS
from dovetail.spec.part import Part

BLOCK = "block"  # the kind of a layer that names none


def expand(layers: Any) -> list[Any]:
    """Expand `repeat` and `pattern` to one mapping per layer."""
    if not isinstance(layers, list):
        raise SpecError("layers", f"expected a list of layers, got {layers!r}")
    out: list[Any] = []
    fields = 0
    for i, entry in enumerate(layers):
        if not isinstance(entry, Mapping):
            raise SpecError(f"layers.{i}", f"expected a mapping, got {entry!r}")
        pattern = entry.get("pattern", [None])
        if not isinstance(pattern, list) or not all(isinstance(name, str) for name in pattern if name is not None):
            raise SpecError(f"layers.{i}.pattern", f"expected a list of names, got {pattern!r}")
        repeat = entry.get("repeat", len(pattern))
        if type(repeat) is not int or repeat < 1:
            raise SpecError(f"layers.{i}.repeat", f"{repeat!r} is not a whole number above 0")
        if len(out) + repeat > SPEC_LAYERS:
            raise SpecError(f"layers.{i}.repeat", f"{len(out) + repeat:,} layers", f"the limit is {SPEC_LAYERS:,}")
        fields += repeat * _count(entry)
        if fields > SPEC_FIELDS:
            raise SpecError(f"layers.{i}", f"{fields:,} fields in all expanded layers", f"the limit is {SPEC_FIELDS:,}")
        names = {name for name in pattern if name is not None}
        if missing := sorted(names - set(entry)):
            raise SpecError(
                f"layers.{i}.pattern", f"{missing[0]!r} is not described", f"add `{missing[0]}:` beside the pattern"
            )
        for name in names:
            if not isinstance(entry[name], Mapping):
                raise SpecError(f"layers.{i}.{name}", f"expected a mapping, got {entry[name]!r}")
        common = {k: v for k, v in entry.items() if k not in {"repeat", "pattern", *names}}
        for layer in range(repeat):
            own = entry.get(pattern[layer % len(pattern)], {}) if names else {}
            out.append({"kind": BLOCK, **common, **own})
    return out


def _count(data: Any) -> int:
    """The number of values in plain data, at any depth."""
    if isinstance(data, Mapping):
        return 1 + sum(map(_count, data.values()))
    return 1 + sum(map(_count, data)) if isinstance(data, (list, tuple)) else 1


def fold(layers: Sequence[Part]) -> list[Any]:
    """Write equal neighbors once, with `repeat`."""
    out: list[Any] = []
    previous: Part | None = None
    for block in layers:
        if block == previous:
            out[-1]["repeat"] += 1
        else:
            kind = {} if block.kind == BLOCK else {"kind": block.kind}
            out.append({"repeat": 1, **kind, **block.changed()})
        previous = block
    return [
        entry if entry["repeat"] > 1 else {k: v for k, v in entry.items() if k != "repeat"} or {"repeat": 1} for entry in out
    ]
