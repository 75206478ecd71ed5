"""What every recurrent mixer shares: rows of sequences in, a memory of fixed size carried from token to token.

    h_t = f(h_{t−1}, x_t)          y_t = g(h_t, x_t)

The module of such a part writes `recur` alone; where the memory comes from and goes to (nowhere, a pool, the next rank) is the
view's business. Its part is a `Recurrent` and declares State(per="sequence").
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Mixer
from dovetail.core.module import Module
from dovetail.core.part import Problem
from dovetail.core.rows import SequenceRows, sequence_rows
from dovetail.core.scope import Scope

Carry = tuple[Tensor, ...]  # (rows, *axes) of each declared state, in order


class Recurrent(Mixer):
    """A mixer whose memory does not grow with the text."""

    recurrent: ClassVar[bool] = True

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        width = scope.size("embed")
        if length is None or length >= width:
            return []
        what = f"at {length} tokens, fewer than the width of {width}, attention is the cheaper one and forgets nothing"
        return [Problem("", what, "use attention, unless longer texts will come")]


class RecurrentModule(Module):
    """x (…, n, embed) -> like x."""

    def forward(self, x: Tensor, ctx: Ctx, view: Any = None) -> Tensor:
        seq = sequence_rows(ctx.layout)
        x, carry = seq.spread(x), None
        if view is not None:
            x, carry = view.read(x)
        y, carry = self.recur(x, seq, ctx, None if seq.begins else carry)
        if view is not None:
            y = view.write(y, *carry)
        return seq.gather(y)

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        """x (rows, n, embed) and what was remembered before it (None: nothing) to the output and what is remembered after.

        Padding leaves the memory as it was; where `line.document` counts up, the memory starts from nothing."""
        raise NotImplementedError
