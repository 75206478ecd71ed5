"""Norms over the generic axis `dim`: x (…, dim) -> like x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dovetail.spec.part import Part
from dovetail.spec.scope import Scope


class Norm(Part):
    """Normalizes over the generic axis `dim`. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "norm"
    # what x is divided by, one number per group of channels; what the norm returns
    TAPS = {"scale": "pos group", "out": "pos channel"}

    reduces = ("dim",)

    def taps(self, scope: Scope) -> Mapping[str, str]:
        per_head = scope.names(("dim",)) in (("head",), ("value",))
        return {name: axes.replace("pos", "pos head") for name, axes in self.TAPS.items()} if per_head else self.TAPS
