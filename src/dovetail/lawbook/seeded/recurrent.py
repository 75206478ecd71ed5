"""Bugs of recurrences: memories that padding moves, chunks whose edges do not meet, tails that are stale."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.core.rows import SequenceRows
from dovetail.dist import context
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops.scan import decay, selective, space
from dovetail.parts.mixer import mamba, mamba2, s4
from dovetail.state import frame, slots

_conv, _chunked = mamba2.causal_conv, decay.chunked
_in_runs, _spaced, _convolved, _discrete = selective.in_runs, space.chunked, space.convolved, s4.S4Module.discrete
_read, _carry_read = frame.SequenceView.read, context.CarryView.read


def padding_is_a_token(self: SequenceRows, x: Tensor) -> Tensor:
    return x


def stale_tail(x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, seq, tail)
    return y, new if tail is None else tail


def tail_ends_with_the_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, tail: Any
) -> tuple[Tensor, Tensor]:
    y, _ = _conv(x, weight, bias, seq, tail)
    return y, _conv(x, weight, bias, dc.replace(seq, real=None, document=None, ends=None), tail)[1]


def tail_too_short_for_a_short_chunk(
    x: Tensor, weight: Tensor, bias: Any, seq: SequenceRows, tail: Any
) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, seq, tail)
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


def back_to_anywhere(self: slots.Single, length: int, written: int, n: int) -> bool:
    return True


def handed_on_late(self: context.CarryView, x: Tensor) -> Any:
    x, carry = _carry_read(self, x)
    return x, None if carry is None else tuple(0 * c for c in carry)


def runs_from_nothing(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Any, carry: Tensor, run: int) -> Any:
    cuts = [slice(i, i + run) for i in range(0, x.shape[1], run)]
    pieces = [(x[:, cut], dt[:, cut], a, b[:, cut], c[:, cut], None if keep is None else keep[:, cut]) for cut in cuts]
    alone = [_in_runs(*piece, carry, run)[0] for piece in pieces]
    return torch.cat(alone, 1), _in_runs(x, dt, a, b, c, keep, carry, run)[1]


def never_a_new_document(document: Tensor | None, dtype: torch.dtype) -> None:
    return None


def of_own_channels_alone(self: mamba.MambaModule, x: Tensor, ctx: Any) -> list[Tensor]:
    return [self.low(x), self.b(x), self.c(x)]


def step_not_written(x: Tensor, dt: Tensor, *rest: Any) -> Any:
    return selective.selective_scan(x / dt.clamp(min=1e-9), dt, *rest)


def time_passes_at_padding(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, document: Any, count: Any, carry: Tensor) -> Any:
    return _spaced(u, log_a, b, c, document, None, carry)


def wraps_around(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, carry: Tensor) -> Any:
    y, left = _convolved(u, log_a, b, c, carry)
    twice = _convolved(torch.cat([u, torch.zeros_like(u)], 1), log_a, b, c, carry)[0]
    return y + twice[:, u.shape[1] :], left


def half_of_each_pair(self: s4.S4Module) -> Any:
    log_a, b, c = _discrete(self)
    return log_a, b, c / 2


def step_without_hold(self: s4.S4Module) -> Any:
    log_a, b, c = _discrete(self)
    return log_a, self.step_log.double().exp()[:, None].to(b.dtype).expand_as(b), c


def with_first(**mixer: Any) -> Model:
    """A recurrence, then attention."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The rows."""
    model = with_first(kind="mamba2", inner=60, head=6, state_size=5, groups=2)
    selects = with_first(kind="mamba", inner=60, state_size=5, rank=3)
    linear = with_first(kind="s4", inner=20, state_size=5)
    return [
        Mutant(
            "padding advances a state",
            "chunked",
            instead(SequenceRows, "only_real", padding_is_a_token),
            model,
            "transformers#31540",
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
            "a recurrence is rolled back without a mark",
            "rollback",
            instead(slots.Single, "can_rewind", back_to_anywhere),
            model,
        ),
        Mutant("a rank starts from nothing", "sharded", instead(context.CarryView, "read", handed_on_late), model),
        Mutant("a step of Mamba-2 is not above 0", OWN_NUMBER, instead(mamba2.F, "softplus", torch.relu), model),
        Mutant("runs of a scan start from nothing", "fast", instead(selective, "in_runs", runs_from_nothing), selects),
        Mutant(
            "a selective scan goes on into the next document",
            "padded",
            instead(selective, "goes_on", never_a_new_document),
            selects,
        ),
        Mutant(
            "what a token chooses by is not summed over ranks",
            "sharded",
            instead(mamba.MambaModule, "selected", of_own_channels_alone),
            selects,
        ),
        Mutant("Mamba writes without its step width", OWN_NUMBER, instead(mamba, "selective_scan", step_not_written), selects),
        Mutant("time passes at padding", "chunked", instead(space, "chunked", time_passes_at_padding), linear),
        Mutant("a convolution wraps around", "fast", instead(space, "convolved", wraps_around), linear),
        Mutant(
            "of a conjugate pair only one is counted",
            OWN_NUMBER,
            instead(s4.S4Module, "discrete", half_of_each_pair),
            linear,
        ),
        Mutant("S4 is cut in steps by Euler", OWN_NUMBER, instead(s4.S4Module, "discrete", step_without_hold), linear),
    ]
