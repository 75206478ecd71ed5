"""What wires have in common: what they need of a block, and what becomes of that which a branch adds.

    x ← x + scale ∘ multiplier · dropout(f(…))          x (…, n, embed), scale (branches, embed)

What is added may be scaled, by a number or by a learned one a channel (Touvron et al. 2021), and dropped out.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.field import bounded
from dovetail.core.group import Wire
from dovetail.core.module import Module
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight


class Branching(Module):
    """A block, as a wire sees it."""

    branches: tuple[str, ...]

    def branch(self, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        """One branch on the stream (…, n, embed), with the view of its memory."""
        return self._modules[name](x, ctx, views.get(name))  # type: ignore[misc]

    def normed(self, name: str, x: Tensor, ctx: Ctx) -> Tensor:
        """One of the norms the wire asked for."""
        return self._modules[name](x, ctx)  # type: ignore[misc]


@dc.dataclass(frozen=True, kw_only=True)
class Scaled(Wire):
    """What every wire can do to what it adds."""

    multiplier: float = bounded(1.0, above=0)
    layer_scale: float | None = bounded(None, at_least=0)  # a learned number a channel, starting here (Touvron et al. 2021)
    dropout: float = bounded(0.0, at_least=0, below=1)

    def weights(self, scope: Scope) -> list[Weight]:
        if self.layer_scale is None:
            return []
        return [Weight(name="scale", batch=("branches",), out=("embed",), init="const", role="gate")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        assert self.layer_scale is not None
        return torch.full((scope.size("branches"), scope.size("embed")), self.layer_scale, dtype=torch.float64)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"multiplier": [1.0, 0.5], "layer_scale": [None, 0.7], "dropout": [0.0, 0.2]}


class WireModule(Module):
    """forward(x, ctx, block, views) -> x with every branch of the block joined."""

    part: Scaled
    scale: Tensor

    def added(self, y: Tensor, block: Branching, branch: str, ctx: Ctx) -> Tensor:
        """What a branch really adds to the stream."""
        part = self.part
        if part.layer_scale is not None:
            y = y * self.scale[block.branches.index(branch)]
        if part.multiplier != 1.0:
            y = y * part.multiplier
        if part.dropout != 0.0:
            y = ctx.dropout(y, part.dropout, block, branch)
        return ctx.tap(block, f"{branch}_add", y)
