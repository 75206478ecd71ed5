"""Seeded bugs of recurrent cells: gates in another order, a state that padding changes or that a new document keeps."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan import cell
from dovetail.parts.mixer import cells, reverse
from dovetail.parts.mixer.cells import CellModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.part import from_data

_unroll, _gru, _lstm, _start = cell.unroll, cell.gru_step, cell.lstm_step, CellModule.start


def padding_is_a_token(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any, start: Any) -> Any:
    return _unroll(step, x, u, bias, dc.replace(seq, real=None), carry, start)


def documents_continue(document: Tensor | None, dtype: torch.dtype) -> None:
    return None


def second_state_replaced(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any, start: Any) -> Any:
    h, (first, *rest) = _unroll(step, x, u, bias, seq, carry, start)
    return h, (first, *(torch.full_like(m, 0.5) for m in rest))


def matrix_of_the_first_head(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any, start: Any) -> Any:
    return _unroll(step, x, u[:1].expand_as(u), bias, seq, carry, start)


def output_before_cell(x: Tensor, recurrent: Tensor, state: Any) -> Any:
    i, f, g, o = (x + recurrent).chunk(4, -1)
    return _lstm(torch.cat([i, f, o, g], -1), torch.zeros_like(recurrent), state)


def update_gate_inverted(x: Tensor, recurrent: Tensor, state: Any) -> Any:
    (h,) = _gru(x, recurrent, state)
    size = h.shape[-1]
    z = (x[..., size : 2 * size] + recurrent[..., size : 2 * size]).sigmoid()
    n = (h - z * state[0]) / (1 - z)
    return (z * n + (1 - z) * state[0],)


def state_ignored(x: Tensor, recurrent: Tensor, state: Any) -> Any:
    return (torch.tanh(x),)


def begins_from_the_state(self: CellModule, seq: SequenceRows, ctx: Ctx, carry: Any) -> Any:
    """A sequence that begins again starts from the state of its row instead of the one stored at admission."""
    if ctx.encoder_output is None and carry is not None:
        return tuple(state[:, None] for state in carry[: len(self.part.states)])
    return _start(self, seq, ctx, carry)


def padding_of_the_source(ctx: Ctx) -> Tensor:
    assert ctx.encoder_output is not None
    return ctx.encoder_output[..., -1:, :]


def one_document(layout: TokenLayout) -> Tensor:
    """All documents of a row are reversed together."""
    return torch.arange(layout.n).flip(0).expand_as(layout.order)


def from_encoder() -> Model:
    """An encoder–decoder whose encoder is bidirectional and hands over its last output only."""
    both = {"kind": "hybrid_block", "mixer": {"kind": "gru", "inner": 20}, "ssm": {"kind": "reverse", "mixer": "rnn"}}
    encoder = {"width": 28, "vocab": 62, "head": None, "layers": [both]}
    layers = [{"mixer": {"kind": kind, "inner": 20, "heads": 2, "from_encoder": True}} for kind in ("lstm", "gru")]
    return from_data({"width": 28, "vocab": 62, "encoder": encoder, "layers": layers}, Model)


def with_first(**mixer: Any) -> Model:
    """A model of a recurrent layer and an attention layer."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    rnn, lstm, gru = (with_first(kind=kind, inner=20, heads=2) for kind in ("rnn", "lstm", "gru"))
    return [
        Mutant("padding advances a cell", "chunked", instead(cells, "unroll", padding_is_a_token), gru),
        Mutant("a cell keeps its state in the next document", "padded", instead(cell, "goes_on", documents_continue), rnn),
        Mutant("an LSTM carries one of its two states", "chunked", instead(cells, "unroll", second_state_replaced), lstm),
        Mutant(
            "all heads use the matrix of the first", "every_weight", instead(cells, "unroll", matrix_of_the_first_head), lstm
        ),
        Mutant(
            "the gates of an LSTM are in another order",
            OWN_NUMBER,
            instead(cells.Lstm, "step", staticmethod(output_before_cell)),
            lstm,
        ),
        Mutant(
            "the update gate of a GRU is inverted",
            OWN_NUMBER,
            instead(cells.Gru, "step", staticmethod(update_gate_inverted)),
            gru,
        ),
        Mutant(
            "a sequence that begins again starts from the state of its row",
            "rollback",
            instead(CellModule, "start", begins_from_the_state),
            from_encoder(),
        ),
        Mutant("a cell starts from padding", "padded", instead(cells, "last_of_source", padding_of_the_source), from_encoder()),
        Mutant(
            "documents of a row are reversed together",
            "padded",
            instead(reverse, "reversed_index", one_document),
            from_encoder(),
        ),
        Mutant("a cell ignores its state", "every_weight", instead(cells.Rnn, "step", staticmethod(state_ignored)), rnn),
    ]
