"""Sinusoidal absolute positions, added to the residual stream; no weights, any length.

PE(p, 2i) = sin(p · base^(−2i/d))      PE(p, 2i+1) = cos(p · base^(−2i/d))            Vaswani et al. 2017
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dovetail.core.field import bounded
from dovetail.core.group import Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Module
from dovetail.core.part import Problem, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight


@register("sinusoidal")
class Sinusoidal(Position):
    """Sinusoidal absolute positions: sine and cosine of geometric wavelengths."""

    site: ClassVar[Literal["stream", "mixer", "any"]] = "stream"
    base: float = bounded(10000.0, above=0)

    def module(self) -> type[Module]:
        return SinusoidalModule

    def axes(self, scope: Scope) -> Scope:
        return scope.add(wave=scope.size("embed") // 2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="frequency", out=("wave",), role="const")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        pairs = scope.size("wave")
        return self.base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)

    def check(self, scope: Scope) -> list[Problem]:
        odd = scope.size("embed") % 2
        return [Problem("", f"needs an even width, not {scope.size('embed')}", "sine and cosine come in pairs")] if odd else []

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"base": [10000.0, 100.0]}


class SinusoidalModule(PositionModule):
    """x (…, n, embed) -> like x."""

    frequency: Tensor

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        angle = layout.order[..., None].to(self.frequency.dtype) * self.frequency
        return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(x.dtype)
