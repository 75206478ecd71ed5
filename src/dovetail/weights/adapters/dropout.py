"""Dropout inside an adapter, of the Ctx with which the leaf is called.

    d ⊙ x,   d = 0 with probability p, else 1/(1 − p)        d: a function of (seed, path, sample, position, channel)
                                                             experts: (seed, path, sample, position, expert, channel)

The path is that of the leaf: of leaves that share a weight, and so an adapter, each draws by its own. A recomputed pass has the
same Ctx, and so draws the same numbers; so do ranks, micro-batches and a resumed run (nn/draws.py). Without draws, outside
training, x is returned as it is.

Shapes: x (…, n, inp), or (rows, inp) for experts.
"""

from __future__ import annotations

import dataclasses as dc
from typing import NamedTuple

from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Rows
from dovetail.spec.scope import Scope

ENCODER = "encoder"  # the axis of the encoder output, whose tokens have a layout of their own


class InputDropout(NamedTuple):
    """The dropout of what an adapter reads: the path of the leaf, the scope of the adapter, and the probability."""

    path: str
    scope: Scope
    p: float

    def drop(self, x: Tensor, axes: tuple[str, ...], ctx: Ctx) -> Tensor:
        """x (…, n, inp) with dropout; `axes` are the logical axes of its channels."""
        draws = ctx.draws
        if draws is None:
            return x
        if axes == (ENCODER,) and ctx.encoder_layout is not None:
            ctx = dc.replace(ctx, layout=ctx.encoder_layout)
        if x.shape[:-1] != ctx.layout.order.shape:
            shapes = f"{tuple(x.shape[:-1])} are not one per token {tuple(ctx.layout.order.shape)}"
            remedy = "leave it out of the targets, or set dropout to 0"
            raise InputError(f"{self.path}: its inputs {shapes}, by which dropout is drawn; {remedy}")
        return draws.dropout(ctx, x, self.p, self, "dropout", axes)

    def drop_rows(self, x: Tensor, axes: tuple[str, ...], rows: Rows, experts: tuple[str, ...], here: int, ctx: Ctx) -> Tensor:
        """x (rows, inp) of a bank with `here` of its experts on this rank, with dropout."""
        if ctx.draws is None:
            return x
        tokens = ctx.layout.order.numel()
        token = rows.choice // (len(rows.choice) // tokens)
        expert = rows.expert + ctx.ranks.first(self, experts, here)
        return ctx.draws.dropout_rows(ctx, x, self.p, self, "dropout", axes, token, expert)
