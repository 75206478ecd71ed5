"""A spec at another width: every size that its part declares to grow with the width grows in proportion.

    width 256, 4 heads, hidden 704   ->   width 512, 8 heads, hidden 1408        heads keep their size, and become more

Under µP the logits of a head that is tied to the embedding are multiplied by base_width/width.          Yang et al. 2022
"""

from __future__ import annotations

import dataclasses as dc
from fractions import Fraction
from typing import Any

from dovetail.core.check import check
from dovetail.core.errors import SpecError
from dovetail.core.field import widening
from dovetail.core.part import Part, join
from dovetail.model import Model


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
