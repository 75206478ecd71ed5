"""reverse: a recurrent mixer that runs from the last token of a document to its first, for encoders.

    y = reversed(f(reversed(x)))          each document by itself

Beside the same mixer in the usual direction it makes a bidirectional layer (Schuster & Paliwal 1997):
`{kind: hybrid_block, mixer: gru, ssm: {kind: reverse, mixer: gru}}`.

Shapes: x (…, n, embed).
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mixer, Order
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.nn.recur import Recurrent
from dovetail.nn.view import KVView
from dovetail.ops.attend import WHOLE
from dovetail.spec.part import Problem, broken, child, register
from dovetail.spec.scope import Scope


@register("reverse")
class Reverse(Mixer):
    """A recurrent mixer, from the last token to the first."""

    mixer: Recurrent = child("gru")

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return dc.replace(scope, decodes=False)

    def order(self) -> Order:
        return "both"

    def check(self, scope: Scope) -> list[Problem]:
        start = "a state at the last token of a target follows no source"
        values = f"{self.mixer.kind} reads values of the model or of other layers, which a reversed mixer is not given"
        return broken(
            (self.mixer.starts_from_encoder(), "mixer.from_encoder", start, "set it to false"),
            (self.mixer.reads(scope), "mixer", values, "use it in the usual direction"),
        )


class ReverseModule(Module, of=Reverse):
    """x (…, n, embed) -> like x."""

    mixer: Module

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        (tokens,), layout = view.append(ctx.layout, x).entries()  # of all ranks, where they split a sequence
        index = layout.once("reversed", lambda: reversed_index(layout))
        out = _take(self.mixer(_take(tokens, index), dc.replace(ctx, layout=layout, views=None)), index)
        return out if layout is ctx.layout else _take(out, layout.once("own tokens", lambda: _own(ctx.layout, layout)))


def reversed_index(layout: TokenLayout) -> Tensor:
    """(…, n) for each token the index of the one that takes its place where every document is reversed; padding stays."""
    document = layout.seg if layout.row is None else layout.row * (1 + layout.seg.amax()) + layout.seg
    last = layout.order.amax()
    forward, back = (document * (1 + last) + key for key in (layout.order, last - layout.order))
    return torch.empty_like(layout.order).scatter(-1, forward.argsort(stable=True), back.argsort(stable=True))


def _own(own: TokenLayout, every: TokenLayout) -> Tensor:
    """(…, n) the index of each token of this rank among all."""
    same = (own.seg[..., :, None] == every.seg[..., None, :]) & (own.order[..., :, None] == every.order[..., None, :])
    return same.int().argmax(-1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x[index] if index.dim() == 1 else x.take_along_dim(index[..., None], -2)
