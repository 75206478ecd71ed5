"""Bugs of recurrent cells: gates in another order, a memory that padding moves or a new document keeps."""

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


def never_a_new_document(document: Tensor | None, dtype: torch.dtype) -> None:
    return None


def second_memory_forgotten(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any) -> Any:
    h, (first, *rest) = _unroll(step, x, u, bias, seq, carry)
    return h, (first, *(torch.full_like(m, 0.5) for m in rest))


def heads_of_the_first_row(step: Any, x: Tensor, u: Tensor, bias: Any, seq: SequenceRows, carry: Any) -> Any:
    return _unroll(step, x, u[:1].expand_as(u), bias, seq, carry)


def output_before_cell(x: Tensor, held: Tensor, memory: Any) -> Any:
    i, f, g, o = (x + held).chunk(4, -1)
    return _lstm(torch.cat([i, f, o, g], -1), torch.zeros_like(held), memory)


def update_the_other_way(x: Tensor, held: Tensor, memory: Any) -> Any:
    (h,) = _gru(x, held, memory)
    size = h.shape[-1]
    z = (x[..., size : 2 * size] + held[..., size : 2 * size]).sigmoid()
    n = (h - z * memory[0]) / (1 - z)
    return (z * n + (1 - z) * memory[0],)


def only_the_token(x: Tensor, held: Tensor, memory: Any) -> Any:
    return (torch.tanh(x),)


def with_first(**mixer: Any) -> Model:
    """A cell, then attention."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The rows."""
    rnn, lstm, gru = (with_first(kind=kind, inner=20, heads=2) for kind in ("rnn", "lstm", "gru"))
    return [
        Mutant("padding advances a cell", "chunked", instead(cells, "unroll", padding_is_a_token), gru),
        Mutant("a cell goes on into the next document", "padded", instead(cell, "goes_on", never_a_new_document), rnn),
        Mutant("an LSTM remembers one of its two memories", "chunked", instead(cells, "unroll", second_memory_forgotten), lstm),
        Mutant("all heads have the first one's matrix", "every_weight", instead(cells, "unroll", heads_of_the_first_row), lstm),
        Mutant(
            "an LSTM's gates in another order", OWN_NUMBER, instead(cells.Lstm, "step", staticmethod(output_before_cell)), lstm
        ),
        Mutant(
            "a GRU's update gate the other way round",
            OWN_NUMBER,
            instead(cells.Gru, "step", staticmethod(update_the_other_way)),
            gru,
        ),
        Mutant("a cell without memory", "every_weight", instead(cells.Rnn, "step", staticmethod(only_the_token)), rnn),
    ]
