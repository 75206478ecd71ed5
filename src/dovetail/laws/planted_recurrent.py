"""Bugs of recurrences: memories that padding moves, chunks whose edges do not meet, tails that are stale."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.core.line import Line
from dovetail.dist import context
from dovetail.laws.mutant import Mutant, instead, spec
from dovetail.laws.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops.scan import decay
from dovetail.parts.mixer import mamba2
from dovetail.state import frame, slots

_conv, _chunked = mamba2.causal_conv, decay.chunked
_read, _carry_read = frame.SequenceView.read, context.CarryView.read


def padding_is_a_token(self: Line, x: Tensor) -> Tensor:
    return x


def stale_tail(x: Tensor, weight: Tensor, bias: Tensor | None, line: Line, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, line, tail)
    return y, new if tail is None else tail


def tail_ends_with_the_row(x: Tensor, weight: Tensor, bias: Tensor | None, line: Line, tail: Any) -> tuple[Tensor, Tensor]:
    y, _ = _conv(x, weight, bias, line, tail)
    return y, _conv(x, weight, bias, dc.replace(line, real=None, document=None, ends=None), tail)[1]


def tail_too_short_for_a_short_chunk(x: Tensor, weight: Tensor, bias: Any, line: Line, tail: Any) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, line, tail)
    return y, new * (torch.arange(new.shape[-1]) >= new.shape[-1] - x.shape[1])


def carry_dropped_at_a_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Any, carry: Tensor) -> tuple[Tensor, Tensor]:
    size = decay.chunk()
    cuts = [slice(i, i + size) for i in range(0, q.shape[1], size)]
    pieces = [(q[:, cut], k[:, cut], v[:, cut], g[:, cut], None if document is None else document[:, cut]) for cut in cuts]
    alone = [_chunked(*piece, carry)[0] for piece in pieces]
    return torch.cat(alone, 1), _chunked(q, k, v, g, document, carry)[1]


def documents_go_on(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Any, carry: Tensor) -> tuple[Tensor, Tensor]:
    return _chunked(q, k, v, g, None, carry)


def memory_never_read(self: frame.SequenceView, x: Tensor) -> Any:
    x, carry = _read(self, x)
    return x, tuple(torch.zeros_like(c) for c in carry)


def back_to_anywhere(self: slots.Single, row: int, held: int, n: int) -> int:
    return n


def handed_on_late(self: context.CarryView, x: Tensor) -> Any:
    x, carry = _carry_read(self, x)
    return x, None if carry is None else tuple(0 * c for c in carry)


def hybrid() -> Model:
    """Mamba-2 twice, then attention."""
    made = spec()
    mixer = {"kind": "mamba2", "inner": 60, "head": 6, "state_size": 5, "groups": 2}
    return made.set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The rows."""
    model = hybrid()
    return [
        Mutant(
            "padding advances a state", "chunked", instead(Line, "only_real", padding_is_a_token), model, "transformers#31540"
        ),
        Mutant("a convolution's tail is stale", "chunked", instead(mamba2, "causal_conv", stale_tail), model),
        Mutant(
            "padding is in a convolution's tail",
            "chunked",
            instead(mamba2, "causal_conv", tail_ends_with_the_row),
            model,
            "transformers#48256",
        ),
        Mutant(
            "a chunk shorter than the convolution forgets",
            "chunked",
            instead(mamba2, "causal_conv", tail_too_short_for_a_short_chunk),
            model,
            "fla#1140",
        ),
        Mutant(
            "the carry is lost at a chunk's edge", "fast", instead(decay, "chunked", carry_dropped_at_a_chunk), model, "fla#547"
        ),
        Mutant("a state goes on into the next document", "fast", instead(decay, "chunked", documents_go_on), model),
        Mutant("a memory is never read", "chunked", instead(frame.SequenceView, "read", memory_never_read), model),
        Mutant(
            "a recurrence is rolled back without a mark", "rollback", instead(slots.Single, "back", back_to_anywhere), model
        ),
        Mutant("a rank starts from nothing", "sharded", instead(context.CarryView, "read", handed_on_late), model),
        Mutant("a step of Mamba-2 is not above 0", OWN_NUMBER, instead(mamba2.F, "softplus", torch.relu), model),
    ]
