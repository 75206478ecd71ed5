"""Initialization: the standard deviation of each weight and the scale of its learning rate."""

from __future__ import annotations

from typing import ClassVar

from dovetail.spec.part import Part
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


class Init(Part):
    """Initialization: the standard deviation of normal weights, by role, fan-in and depth. No module."""

    group: ClassVar[str] = "init"

    def std(self, weight: Weight, scope: Scope) -> float:
        """Standard deviation for a weight whose init is `normal`."""
        raise NotImplementedError

    def lr_scale(self, weight: Weight, scope: Scope) -> float:
        """What the learning rate of a weight under AdamW is multiplied by."""
        return 1.0

    def tied_scale(self, width: int) -> float | None:
        """What the logits of a head that is tied to the embedding should be multiplied by; None: as the head says."""
        return None
