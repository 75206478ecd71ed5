"""No position at all (NoPE): a causal mask alone lets a decoder recover order (Haviv et al. 2022; Kazemnejad et al. 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

from dovetail.core.group import Position
from dovetail.core.part import register


@register("none")
class NoPosition(Position):
    """No positions (NoPE)."""

    site: ClassVar[Literal["stream", "mixer", "any"]] = "any"
