"""Layers picked from one spec for another: some left out, some taken again, or in another order.

    0-3,3,5     layers 0, 1, 2 and 3, layer 3 once more, then layer 5        (Kim et al. 2023: depth up-scaling)

Layer j of what comes out is layer picks[j] of what was there. Only the model's own layers are picked, not its encoder's.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Sequence

from dovetail.core.errors import SpecError
from dovetail.model import Model

MOST = 4096  # layers: deeper models than any there is; a bound on what a text may ask for
RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
OWN_LAYER = re.compile(r"layers\.(\d+)(?=\.)")


def parse_picks(text: str, depth: int) -> tuple[int, ...]:
    """The numbers of layers that a text like `0-3,3,5` names, each below `depth`; `3-0` counts down."""
    found: list[int] = []
    for run in text.split(","):
        match = RUN.fullmatch(run.strip())
        if match is None:
            raise SpecError(
                "layers", f"{run.strip()[:40]!r} is no layer and no run of layers", "write numbers and runs: 0-3,3,5"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        _check((first, last), depth)
        found += range(first, last + 1) if first <= last else range(first, last - 1, -1)
        if len(found) > MOST:
            raise SpecError("layers", f"more than {MOST} layers are named")
    return tuple(found)


def picked(spec: Model, picks: Sequence[int]) -> Model:
    """The spec with layer picks[j] at every place j."""
    _check(picks, len(spec.layers))
    return dc.replace(spec, layers=tuple(spec.layers[i] for i in picks))


def came_from(path: str, picks: Sequence[int] | None) -> str:
    """Where the tensor at this path stood before the layers were picked."""
    match = OWN_LAYER.match(path)
    return path if picks is None or match is None else f"layers.{picks[int(match[1])]}{path[match.end() :]}"


def _check(picks: Sequence[int], depth: int) -> None:
    for i in picks:
        if not 0 <= i < depth:
            raise SpecError("layers", f"there is no layer {i}", f"they are 0 to {depth - 1}")
