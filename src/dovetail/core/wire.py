"""The base of wires: the interface of a block that a wire uses, and the scaling and dropout of what a branch adds.

    x ← x + scale ∘ multiplier · dropout(f(…))          x (…, n, embed), scale (branches, embed)

`multiplier` is a fixed number; `scale` is learned, one number per channel (LayerScale, Touvron et al. 2021). With
`stream_scale` the residual stream that leaves the block is multiplied by one number, which is saved and not trained (Gemma 4).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.field import MAX_FACTOR, bounded
from dovetail.core.group import Steps, Wire
from dovetail.core.module import Module
from dovetail.core.part import Mistake
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

if TYPE_CHECKING:
    from dovetail.core.cross_layer import Values


class Branching(Module):
    """The interface of a block that a wire uses."""

    branches: tuple[str, ...]
    steps: Steps

    def branch(self, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any], **values: Values) -> Tensor:
        """Apply one branch to x (…, n, embed); a mixer is given its view. `values` is what it reads of other layers, if any."""
        module = self._modules[name]
        assert module is not None
        return module(x, ctx, views[name], **values) if name in views else module(x, ctx, **values)

    def normed(self, name: str, x: Tensor, ctx: Ctx) -> Tensor:
        """Apply one of the norms that the wire declared; x where a branch has norms of its own."""
        norm = self._modules.get(name)
        return x if norm is None else norm(x, ctx)


@dc.dataclass(frozen=True, kw_only=True)
class Scaled(Wire):
    """A wire that can scale and drop out what its branches add."""

    MISTAKES = {"multiplier": Mistake("residual scale", (1.0,))}

    multiplier: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    # LayerScale: the initial value of one learned number per channel
    layer_scale: float | None = bounded(None, at_least=0, at_most=MAX_FACTOR)
    dropout: float = bounded(0.0, at_least=0, below=1)
    stream_scale: bool = False  # one number of the layer multiplies the residual stream behind its last branch

    SAMPLES = {"multiplier": [1.0, 0.5], "layer_scale": [None, 0.7], "dropout": [0.0, 0.2], "stream_scale": [False, True]}

    def axes(self, scope: Scope) -> Scope:
        return scope.add(one=1)

    def weights(self, scope: Scope) -> list[Weight]:
        declared: list[Weight] = []
        if self.layer_scale is not None:
            declared.append(Weight(name="scale", batch=("branches",), out=("embed",), init="const", role="gate"))
        if self.stream_scale:
            declared.append(Weight(name="stream", out=("one",), init="ones", role="updated", tp="replicate"))
        return declared

    def rescales(self) -> bool:
        return self.stream_scale

    def constant(self, name: str, scope: Scope) -> Tensor:
        assert self.layer_scale is not None
        return torch.full((scope.size("branches"), scope.size("embed")), self.layer_scale, dtype=torch.float64)


class WireModule(Module):
    """forward(x, ctx, block, views) -> x after every branch of the block; x is (…, n, embed), or (…, n, streams, embed)."""

    part: Scaled
    scale: Tensor
    stream: Tensor

    def rescaled(self, x: Tensor) -> Tensor:
        """The residual stream behind the last branch, times the number of this layer."""
        return x * self.stream.to(x.dtype)

    def open(self, x: Tensor) -> Tensor:
        """The residual stream (…, n, embed) as several, before the first block that has them."""
        raise NotImplementedError

    def close(self, x: Tensor) -> Tensor:
        """Several residual streams (…, n, streams, embed) as one, after the last block that has them."""
        raise NotImplementedError

    def sum(self, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        """What the branches of a step, all of which read x, add to the residual stream together."""
        total = self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)
        for name in step[1:]:
            total = total + self.added(block.branch(name, x, ctx, views), block, name, ctx)
        return total

    def added(self, y: Tensor, block: Branching, branch: str, ctx: Ctx) -> Tensor:
        """Return y, scaled and dropped out: what the branch adds to the residual stream."""
        part = self.part
        if part.layer_scale is not None:
            y = y * self.scale[block.branches.index(branch)]
        if part.multiplier != 1.0:
            y = y * part.multiplier
        if ctx.draws is not None:
            y = ctx.draws.dropout(ctx, y, part.dropout, block, branch)
        return y if ctx.taps is None else ctx.tap(block, f"{branch}_add", y)
