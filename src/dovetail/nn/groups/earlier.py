"""What attention takes from an earlier layer: k and v (…, n, kv_heads, head) -> the k and v to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from dovetail.nn.module import Module
from dovetail.spec.part import Part

if TYPE_CHECKING:
    from dovetail.nn.cross_layer import Values


class Earlier(Part):
    """What attention takes from an earlier layer: its keys and values, say. Module: an EarlierModule."""

    group: ClassVar[str] = "earlier"
    names: ClassVar[tuple[str, ...]] = ()  # of the values that it reads: k, v
    projects: ClassVar[bool] = True  # whether attention still computes keys and values of its own

    layer: int


class EarlierModule(Module):
    """The module of what is taken from an earlier layer."""

    def forward(self, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """k and v (…, n, kv_heads, head) of this layer, and values of the earlier one -> the k and v to use."""
        raise NotImplementedError
