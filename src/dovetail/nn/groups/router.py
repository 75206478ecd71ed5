"""Routers choose experts: x (…, n, embed) -> indices and weights (…, n, choices)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.module import Module
from dovetail.spec.part import Part


class Router(Part):
    """Routes each token to a few of the `experts`, an axis that its parent defines. Module: a RouterModule."""

    group: ClassVar[str] = "router"

    def choices(self) -> int:
        """The number of experts that each token is routed to."""
        raise NotImplementedError


class RouterModule(Module):
    """The module of a router."""

    def forward(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """x (…, n, embed) -> indices of the chosen experts (…, n, choices), and their weights (…, n, choices)."""
        raise NotImplementedError

    def rebalance(self) -> None:
        """Update the load-balancing state after an optimizer step; by default there is none."""
