"""Dropout inside an adapter: the Ctx of the part that runs, lent to the adapters of its leaves.

    d ⊙ x,   d = 0 with probability p, else 1/(1 − p)        d: a function of (seed, path, sample, position, channel)
                                                             experts: (seed, path, sample, position, expert, channel)

A leaf is called as `leaf(x)`, without the Ctx, which has the seed and the token positions. Hooks of the part that owns the leaf
lend it for the time of its forward pass. A recomputed pass lends the same Ctx again, and so draws the same numbers; so do
ranks, micro-batches and a resumed run (core/ctx.py). Without a seed, outside training, x is returned as it is.

Shapes: x (…, n, inp), or (rows, inp) for experts.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from dovetail.core.ctx import Ctx
from dovetail.core.errors import InputError
from dovetail.core.linear import Linear, Rows
from dovetail.core.scope import Scope
from dovetail.weights.adapters.kind import AdapterModule

HANDLES = "_lending"  # the attribute of an owner that holds its hooks
ENCODER = "encoder"  # the axis of the encoder output, whose tokens have a layout of their own


class Lent(NamedTuple):
    """A forward pass of the part that owns a leaf: its Ctx, the path of the leaf, and the scope of its adapter."""

    ctx: Ctx
    path: str
    scope: Scope

    def drop(self, x: Tensor, p: float, axes: tuple[str, ...]) -> Tensor:
        """x (…, n, inp) with dropout; `axes` are the logical axes of its channels."""
        ctx, draws = self.ctx, self.ctx.draws
        if draws is None:
            return x
        if axes == (ENCODER,) and ctx.encoder_layout is not None:
            ctx = dc.replace(ctx, layout=ctx.encoder_layout)
        if x.shape[:-1] != ctx.layout.order.shape:
            shapes = f"{tuple(x.shape[:-1])} are not one per token {tuple(ctx.layout.order.shape)}"
            remedy = "leave it out of the targets, or set dropout to 0"
            raise InputError(f"{self.path}: its inputs {shapes}, by which dropout is drawn; {remedy}")
        return draws.dropout(ctx, x, p, self, "dropout", axes)

    def drop_rows(self, x: Tensor, p: float, axes: tuple[str, ...], rows: Rows, experts: tuple[str, ...], here: int) -> Tensor:
        """x (rows, inp) of a bank with `here` of its experts on this rank, with dropout."""
        if self.ctx.draws is None:
            return x
        tokens = self.ctx.layout.order.numel()
        token = rows.choice // (len(rows.choice) // tokens)
        expert = rows.expert + self.ctx.ranks.first(self, experts, here)
        return self.ctx.draws.dropout_rows(self.ctx, x, p, self, "dropout", axes, token, expert)


class Borrower(AdapterModule):
    """The base of adapter modules that may draw."""

    lent: Lent | None = None

    def lend(self, lent: Lent | None) -> None:
        """Take the Ctx of the pass that begins; None where it ends."""
        self.lent = lent


def lend_to(owner: nn.Module) -> None:
    """Let the adapters of a part's leaves have its Ctx while it runs."""
    if HANDLES not in owner.__dict__:
        before = owner.register_forward_pre_hook(_lend, with_kwargs=True)
        setattr(owner, HANDLES, (before, owner.register_forward_hook(_take_back, always_call=True)))


def lend_no_more(model: nn.Module) -> None:
    """Remove the hooks of all parts."""
    for module in model.modules():
        for handle in module.__dict__.pop(HANDLES, ()):
            handle.remove()


def _borrowers(owner: nn.Module) -> Iterator[tuple[str, Borrower]]:
    for name, leaf in owner.named_children():
        if isinstance(leaf, Linear) and isinstance(leaf.adapter, Borrower):
            yield name, leaf.adapter


def _lend(owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    ctx = next((one for one in (*args, *kwargs.values()) if isinstance(one, Ctx)), None)
    for name, adapter in _borrowers(owner):
        # of leaves that share a weight, and so an adapter, each draws by its own path
        adapter.lend(None if ctx is None else Lent(ctx, f"{owner.path}.{name}", adapter.declared[0].scope))


def _take_back(owner: nn.Module, args: Any, output: Any) -> None:
    for _, adapter in _borrowers(owner):
        adapter.lend(None)
