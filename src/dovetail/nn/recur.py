"""The base of recurrent mixers: a recurrent state of fixed size, carried from token to token.

    h_t = f(h_{t−1}, x_t)          y_t = g(h_t, x_t)

A module implements `recur` on rows of sequences. The view reads and writes the state: in a pool while decoding, from and to
the neighboring ranks where a sequence is split. The part derives from `Recurrent` and declares State(per="sequence").

With `starts`, the state before the first token comes from the encoder output (`last_of_source`) instead of being zeros; the
carry holds it beside the state, so that a row of a pool can begin again from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mixer
from dovetail.nn.module import Module
from dovetail.nn.rows import SequenceRows, sequence_rows
from dovetail.nn.view import WHOLE_STATE, StateView
from dovetail.spec.part import Problem
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

Carry = tuple[Tensor, ...]  # (rows, *axes) of each declared state, in order
# what the axis of a state is called at its tap: channels of a head are none of the heads
AXES = {"heads": "head", "key_heads": "kv_head", "groups": "group", "key": "feature", "features": "feature", "head": "channel"}
AXES |= dict.fromkeys(("inner", "embed", "value", "columns"), "channel")


def conv_state(name: str, *channels: str) -> State:
    """The state of a short causal convolution over these channels: its last inputs, along the axis `conv_state`."""
    return State(name=name, axes=(*channels, "conv_state"), per="sequence")


class Recurrent(Mixer):
    """A mixer whose decode state does not grow with the sequence."""

    recurrent: ClassVar[bool] = True

    def taps(self, scope: Scope) -> Mapping[str, str]:
        """The state after the last token of a call is a tap, too; a state of token ids is not."""
        states = [state for state in self.state(scope) if state.dtype != "int64"]
        return {**self.TAPS, **{tap_of(state.name): " ".join(AXES.get(axis, axis) for axis in state.axes) for state in states}}

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        width = scope.size("embed")
        if length is None or length >= width:
            return []
        what = f"at {length} tokens, fewer than the width of {width}, attention costs less and keeps every token"
        return [Problem("", what, "use attention, unless sequences will be longer")]


def tap_of(state: str) -> str:
    """The name of the tap of a declared state: `state`, `conv_x_state`."""
    return state if state == "state" else f"{state}_state"


def last_of_source(ctx: Ctx) -> Tensor:
    """Return the encoder output at the last token of a source: (…, n, encoder), of the source of each token's document; where
    every row has one source, (rows, 1, encoder)."""
    encoded, source, layout = ctx.encoder_output, ctx.encoder_layout, ctx.layout
    if encoded is None or source is None:
        raise StateError("there is no encoder output to start from (call model.encode and put its output in the ctx)")
    if source.start is not None:
        return encoded[..., -1:, :]
    if source.row is not None:
        assert layout.row is not None, "a flat batch of sources, and targets that are not flat"
        same = (layout.row[:, None] == source.row) & (layout.seg[:, None] == source.seg)
    elif source.known.documents is not None and set(source.known.documents) == {1}:
        same = source.real[:, None]
    else:
        same = layout.seg[..., :, None] == source.seg[..., None, :]
    last = torch.where(same, torch.arange(source.n, device=same.device), -1).amax(-1)
    there = (last >= 0)[..., None]  # a source may be empty
    index = last.clamp_min(0)
    picked = encoded[index] if source.row is not None else encoded.take_along_dim(index[..., None], -2)
    return picked * there


class RecurrentModule(Module):
    """x (…, n, embed) -> like x."""

    starts = False  # whether a document starts from the encoder output, and the carry holds that state

    def forward(self, x: Tensor, ctx: Ctx, view: StateView = WHOLE_STATE) -> Tensor:
        seq = sequence_rows(ctx.layout)
        x, carry = view.read(seq.spread(x))
        y, carry = self.recur(x, seq, ctx, None if seq.begins and not self.starts else carry)
        if ctx.taps is not None:
            carry = self.listened(carry, ctx)
        return seq.gather(view.write(y, *carry))

    def listened(self, carry: Carry, ctx: Ctx) -> Carry:
        """Pass the states that are taps to the listeners."""
        names, taps = [tap_of(state.name) for state in self.part.state(self.scope)], self.part.taps(self.scope)
        if not names:  # an encoder keeps none
            return carry
        pairs = zip(names, carry, strict=True)
        return tuple(ctx.tap(self, name, state) if name in taps else state for name, state in pairs)

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        """Return the output (rows, n, embed) and the state after x (rows, n, embed), from the state before it (None: zeros).

        Padding must not change the state. Where `seq.document` increases, the state starts again from zeros."""
        raise NotImplementedError
