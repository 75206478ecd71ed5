"""Feature maps of linear attention: (…, head) -> (…, features)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dovetail.nn.module import Module
from dovetail.spec.part import Part


class Feature(Part):
    """A feature map of linear attention: φ(q)·φ(k) ≥ 0 stands in for exp(q·k). Module: a FeatureModule."""

    group: ClassVar[str] = "feature"

    def count(self, head: int) -> int:
        """The number of features of a query or key of size `head`."""
        return head


class FeatureModule(Module):
    """A feature map: (…, head) -> (…, features), all at least 0. A common factor of a query's features cancels."""

    def query(self, q: Tensor) -> Tensor:
        """The features of queries."""
        return self.key(q)

    def key(self, k: Tensor) -> Tensor:
        """The features of keys."""
        raise NotImplementedError
