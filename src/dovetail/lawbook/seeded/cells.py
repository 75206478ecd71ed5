"""Seeded bugs of recurrent cells: gates in another order, a state that padding changes or that a new document keeps."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.core.rows import SequenceRows
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops.scan import cell
from dovetail.parts.mixer import cells

_unroll, _gru, _lstm = cell.unroll, cell.gru_step, cell.lstm_step


def padding_is_a_token(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any) -> Any:
    return _unroll(step, x, u, bias, dc.replace(seq, real=None), carry)


def documents_continue(document: Tensor | None, dtype: torch.dtype) -> None:
    return None


def second_state_replaced(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any) -> Any:
    h, (first, *rest) = _unroll(step, x, u, bias, seq, carry)
    return h, (first, *(torch.full_like(m, 0.5) for m in rest))


def matrix_of_the_first_head(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any) -> Any:
    return _unroll(step, x, u[:1].expand_as(u), bias, seq, carry)


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
        Mutant("a cell ignores its state", "every_weight", instead(cells.Rnn, "step", staticmethod(state_ignored)), rnn),
    ]
