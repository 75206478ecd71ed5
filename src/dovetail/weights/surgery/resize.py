"""A spec of another size: with other layers, or of another width.

    0-3,3,5     layers 0, 1, 2 and 3, layer 3 once more, then layer 5        (Kim et al. 2023: depth up-scaling)

Layer j of the new spec is layer picks[j] of the old one. Only the layers of the model itself are picked, not its encoder's.

    width 256, 4 heads, hidden 704   ->   width 512, 8 heads, hidden 1408        heads keep their size, and become more

Every size that its part declares to grow with the width grows in proportion. Under µP the logits of a head that is tied to the
embedding are multiplied by base_width/width.          Yang et al. 2022
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import SPEC_LAYERS
from dovetail.model.model import Model
from dovetail.spec.check import check
from dovetail.spec.field import widening
from dovetail.spec.part import Part, join

# -- layers -----------------------------------------------------------------------------------------------------------


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


# -- width ------------------------------------------------------------------------------------------------------------


def widened(spec: Model, width: int) -> Model:
    """The spec with this width; raises SpecError where a size would not be a whole number, or the spec is not legal."""
    wide = with_tied_scale(_grown(spec, Fraction(width, spec.width), ""))
    check(wide)
    return wide


def with_tied_scale(spec: Model) -> Model:
    """The spec with the multiplier of logits that its initialization asks for, where its head is tied to the embedding."""
    scale = spec.init.tied_scale(spec.width)
    return spec if scale is None or spec.head is None else dc.replace(spec, head=spec.head.scaled_if_tied(scale))


def _grown(part: Any, factor: Fraction, path: str) -> Any:
    """The part, and the parts in it, with the sizes that grow multiplied by the factor."""
    changes: dict[str, Any] = {}
    for field in dc.fields(part):
        value, here = getattr(part, field.name), join(path, field.name)
        if isinstance(value, Part):
            changes[field.name] = _grown(value, factor, here)
        elif isinstance(value, tuple) and value and isinstance(value[0], Part):
            changes[field.name] = tuple(_grown(item, factor, join(here, str(i))) for i, item in enumerate(value))
    for name in widening(part):
        size = getattr(part, name)
        if size is None:
            continue
        if (size * factor).denominator != 1:
            raise SpecError(join(path, name), f"{size} times {factor} is not a whole number", "choose another width")
        changes[name] = int(size * factor)
    return dc.replace(part, **changes) if changes else part
