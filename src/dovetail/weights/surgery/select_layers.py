"""Layers picked from one spec for another: some removed, some repeated, or in another order.

    0-3,3,5     layers 0, 1, 2 and 3, layer 3 once more, then layer 5        (Kim et al. 2023: depth up-scaling)

Layer j of the new spec is layer picks[j] of the old one. Only the layers of the model itself are picked, not its encoder's.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Sequence

from dovetail.core.errors import SpecError
from dovetail.core.limits import SPEC_LAYERS
from dovetail.model import Model

RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
OWN_LAYER = re.compile(r"layers\.(\d+)(?=\.)")


def parse_picks(text: str, depth: int) -> tuple[int, ...]:
    """Parse layer numbers and ranges like `0-3,3,5`, each number below `depth`; `3-0` counts down."""
    picks: list[int] = []
    for run in text.split(","):
        match = RANGE.fullmatch(run.strip())
        if match is None:
            problem = f"{run.strip()[:40]!r} is not a layer number or a range"
            raise SpecError("layers", problem, "write numbers and ranges: 0-3,3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        _check((first, last), depth)
        picks += range(first, last + 1) if first <= last else range(first, last - 1, -1)
        if len(picks) > SPEC_LAYERS:
            raise SpecError("layers", f"more than {SPEC_LAYERS} layers are picked; the limit is {SPEC_LAYERS}")
    return tuple(picks)


def picked(spec: Model, picks: Sequence[int]) -> Model:
    """Return the spec with layer picks[j] as layer j."""
    _check(picks, len(spec.layers))
    return dc.replace(spec, layers=tuple(spec.layers[i] for i in picks))


def came_from(path: str, picks: Sequence[int] | None) -> str:
    """Return the path that this tensor had before the layers were picked."""
    match = OWN_LAYER.match(path)
    return path if picks is None or match is None else f"layers.{picks[int(match[1])]}{path[match.end() :]}"


def _check(picks: Sequence[int], depth: int) -> None:
    for i in picks:
        if not 0 <= i < depth:
            raise SpecError("layers", f"there is no layer {i}", f"layers are 0 to {depth - 1}")
