"""Seeded bugs of Mamba, Mamba-2 and S4: states that padding changes, chunk boundaries, stale conv states."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan import decay, selective, state_space
from dovetail.parallel import context
from dovetail.parts import norm
from dovetail.parts.mixer import mamba, mamba2, s4
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.state import frame, slots

_conv, _chunked = mamba2.causal_conv, decay.chunked
_in_runs, _spaced, _convolved, _discrete = selective.in_runs, state_space.chunked, state_space.convolved, s4.S4Module.discrete
_gated, _summed = mamba2.Mamba2Module.gated, norm.RMSNormModule.summed
_read, _carry_read = frame.SequenceView.read, context.CarryView.read


def padding_is_a_token(self: SequenceRows, x: Tensor) -> Tensor:
    return x


def stale_conv_state(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, conv_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, seq, conv_state)
    return y, new if conv_state is None else conv_state


def padding_in_the_conv_state(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, conv_state: Any
) -> tuple[Tensor, Tensor]:
    y, _ = _conv(x, weight, bias, seq, conv_state)
    return y, _conv(x, weight, bias, dc.replace(seq, real=None, document=None, ends=None), conv_state)[1]


def earlier_inputs_lost(x: Tensor, weight: Tensor, bias: Any, seq: SequenceRows, conv_state: Any) -> tuple[Tensor, Tensor]:
    y, new = _conv(x, weight, bias, seq, conv_state)
    return y, new * (torch.arange(new.shape[-1]) >= new.shape[-1] - x.shape[1])


def carry_dropped_at_a_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Any, carry: Tensor) -> tuple[Tensor, Tensor]:
    size = decay.chunk()
    cuts = [slice(i, i + size) for i in range(0, q.shape[1], size)]
    pieces = [(q[:, cut], k[:, cut], v[:, cut], g[:, cut], None if document is None else document[:, cut]) for cut in cuts]
    alone = [_chunked(*piece, carry)[0] for piece in pieces]
    return torch.cat(alone, 1), _chunked(q, k, v, g, document, carry)[1]


def documents_continue(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Any, carry: Tensor) -> tuple[Tensor, Tensor]:
    return _chunked(q, k, v, g, None, carry)


def state_never_read(self: frame.SequenceView, x: Tensor) -> Any:
    x, carry = _read(self, x)
    return x, tuple(torch.zeros_like(c) for c in carry)


def any_rollback_allowed(self: slots.Single, length: int, written: int, n: int) -> bool:
    return True


def carry_zeroed(self: context.CarryView, x: Tensor) -> Any:
    x, carry = _carry_read(self, x)
    return x, None if carry is None else tuple(0 * c for c in carry)


def runs_from_zeros(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Any, carry: Tensor, run: int) -> Any:
    cuts = [slice(i, i + run) for i in range(0, x.shape[1], run)]
    pieces = [(x[:, cut], dt[:, cut], a, b[:, cut], c[:, cut], None if keep is None else keep[:, cut]) for cut in cuts]
    alone = [_in_runs(*piece, carry, run)[0] for piece in pieces]
    return torch.cat(alone, 1), _in_runs(x, dt, a, b, c, keep, carry, run)[1]


def documents_never_begin(document: Tensor | None, dtype: torch.dtype) -> None:
    return None


def not_reduced(self: mamba.MambaModule, x: Tensor, ctx: Any) -> list[Tensor]:
    return [self.low(x, ctx), self.b(x, ctx), self.c(x, ctx)]


def step_divided_out(x: Tensor, dt: Tensor, *rest: Any) -> Any:
    return selective.selective_scan(x / dt.clamp(min=1e-9), dt, *rest)


def padding_counted(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, document: Any, count: Any, carry: Tensor) -> Any:
    return _spaced(u, log_a, b, c, document, None, carry)


def wraps_around(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, carry: Tensor) -> Any:
    y, state = _convolved(u, log_a, b, c, carry)
    twice = _convolved(torch.cat([u, torch.zeros_like(u)], 1), log_a, b, c, carry)[0]
    return y + twice[:, u.shape[1] :], state


def half_of_each_pair(self: s4.S4Module) -> Any:
    log_a, b, c = _discrete(self)
    return log_a, b, c / 2


def euler_step(self: s4.S4Module) -> Any:
    log_a, b, c = _discrete(self)
    return log_a, self.step_log.double().exp()[:, None].to(b.dtype).expand_as(b), c


def gated_first(self: mamba2.Mamba2Module, y: Tensor, z: Tensor, ctx: Any) -> Tensor:
    original = self.part
    self.part = dc.replace(original, norm_before_gate=False)
    try:
        return _gated(self, y, z, ctx)
    finally:
        self.part = original


def one_group(self: norm.RMSNormModule, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, self.part.eps)


def groups_of_a_rank(self: norm.RMSNormModule, x: Tensor) -> Tensor:
    original = self.group_number
    self.group_number = original - original[0]  # counted from 0 on every rank
    try:
        return _summed(self, x)
    finally:
        self.group_number = original


def multipliers_exchanged(
    self: mamba2.Mamba2Module, name: str, u: Tensor, ctx: Ctx, dtype: torch.dtype | None = None
) -> Tensor:
    y = getattr(self, name)(u, ctx) * self.factors["b" if name == "c" else "c" if name == "b" else name]
    return y if dtype is None else y.to(dtype)


def with_first(**mixer: Any) -> Model:
    """A model of a recurrent layer and an attention layer."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    model = with_first(kind="mamba2", inner=60, head=6, state_size=5, groups=2)
    grouped = model.set("layers.0.mixer.norm", {"kind": "rmsnorm", "groups": 2})
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
        Mutant("a conv state is not updated", "chunked", instead(mamba2, "causal_conv", stale_conv_state), model),
        Mutant(
            "padding is in a conv state",
            "chunked",
            instead(mamba2, "causal_conv", padding_in_the_conv_state),
            model,
            "transformers#48256",
        ),
        Mutant(
            "a chunk shorter than the kernel loses inputs",
            "chunked",
            instead(mamba2, "causal_conv", earlier_inputs_lost),
            model,
            "fla#1140",
        ),
        Mutant(
            "the carry is lost between chunks", "fast", instead(decay, "chunked", carry_dropped_at_a_chunk), model, "fla#547"
        ),
        Mutant(
            "a norm before the gate comes after it",
            OWN_NUMBER,
            instead(mamba2.Mamba2Module, "gated", gated_first),
            grouped.set("layers.0.mixer.norm_before_gate", True),
        ),
        Mutant("a grouped norm is over all heads", OWN_NUMBER, instead(norm.RMSNormModule, "by_group", one_group), grouped),
        Mutant(
            "every rank counts the groups of a norm from 0",
            "sharded",
            instead(norm.RMSNormModule, "summed", groups_of_a_rank),
            grouped,
        ),
        Mutant(
            "the multipliers of B and C are exchanged",
            OWN_NUMBER,
            instead(mamba2.Mamba2Module, "projected", multipliers_exchanged),
            model.set("layers.0.mixer.multipliers", [1.0, 1.0, 0.5, 2.0, 1.0]),
        ),
        Mutant("a state continues into the next document", "fast", instead(decay, "chunked", documents_continue), model),
        Mutant("a recurrent state is never read", "chunked", instead(frame.SequenceView, "read", state_never_read), model),
        Mutant(
            "a recurrence is rolled back without a mark",
            "rollback",
            instead(slots.Single, "can_rewind", any_rollback_allowed),
            model,
        ),
        Mutant(
            "a rank ignores the state of the previous rank", "sharded", instead(context.CarryView, "read", carry_zeroed), model
        ),
        Mutant("a step of Mamba-2 is not above 0", OWN_NUMBER, instead(mamba2.F, "softplus", torch.relu), model),
        Mutant("runs of a scan start from zeros", "fast", instead(selective, "in_runs", runs_from_zeros), selects),
        Mutant(
            "a selective scan continues into the next document",
            "padded",
            instead(selective, "goes_on", documents_never_begin),
            selects,
        ),
        Mutant(
            "Δ, B and C of Mamba are not summed over ranks",
            "sharded",
            instead(mamba.MambaModule, "selected", not_reduced),
            selects,
        ),
        Mutant(
            "Mamba does not multiply inputs by the step",
            OWN_NUMBER,
            instead(mamba, "selective_scan", step_divided_out),
            selects,
        ),
        Mutant("padding decays the state of S4", "chunked", instead(state_space, "chunked", padding_counted), linear),
        Mutant("a convolution wraps around", "fast", instead(state_space, "convolved", wraps_around), linear),
        Mutant(
            "S4 counts one of each conjugate pair",
            OWN_NUMBER,
            instead(s4.S4Module, "discrete", half_of_each_pair),
            linear,
        ),
        Mutant("S4 is discretized by Euler", OWN_NUMBER, instead(s4.S4Module, "discrete", euler_step), linear),
    ]
