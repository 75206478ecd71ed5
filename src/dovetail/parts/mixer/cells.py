"""Recurrent cells as mixers: RNN, LSTM and GRU.

    x = u W + b          h_t = cell(x_t, U h_{t−1})          out = h W_o

`heads` splits the recurrent state into independent parts: U is block-diagonal. One head, the default, is the cell of torch.nn.
With `from_encoder`, each state starts from tanh(e W_s + b_s) instead of zeros, where e is the encoder output at the last token
of the source: an encoder that hands over one vector, as before attention (Cho et al. 2014; Sutskever et al. 2014).
Tensor parallel shards heads only: within a head, every channel of the state depends on every other at each token.

Shapes: u (rows, n, embed)   x (rows, n, heads, gates·head)   h, c (rows, heads, head)   U (heads, gates·head, head).
Elman 1990; Hochreiter & Schmidhuber 1997; Cho et al. 2014.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule, last_of_source, tap_of
from dovetail.nn.rows import SequenceRows
from dovetail.nn.view import StateView
from dovetail.ops.scan.cell import Step, gru_step, lstm_step, rnn_step, unroll
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


@dc.dataclass(frozen=True, kw_only=True)
class Cell(Recurrent):
    """A recurrent cell between an input and an output projection."""

    TAPS = {"x": "pos head channel", "h": "pos head channel", "out": "pos channel"}

    gates: ClassVar[int] = 1  # values that the input projection gives per channel of the state
    states: ClassVar[tuple[str, ...]] = ("h",)
    step: ClassVar[Step] = staticmethod(rnn_step)

    inner: int | None = bounded(None, above=0, widens=True)  # size of the state, over all heads; None: the width
    heads: int = bounded(1, above=0, widens=True)
    bias: bool = True
    out_bias: bool = False
    from_encoder: bool = False  # whether the state starts from the encoder output, rather than from zeros

    tp_region = True

    def starts_from_encoder(self) -> bool:
        return self.from_encoder

    def start(self) -> tuple[str, ...]:
        """Names of the projections of the encoder output, and of the states that hold what a sequence starts from."""
        return tuple(f"{name}_start" for name in self.states) if self.from_encoder else ()

    def axes(self, scope: Scope) -> Scope:
        inner = self.inner or scope.size("embed")
        return scope.add(heads=self.heads, head=inner // max(self.heads, 1), gates=self.gates)

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner, gates = ("embed",), ("heads", "head"), ("heads", "gates", "head")
        return [
            Weight(name="x.weight", out=gates, inp=embed),
            Weight(name="o.weight", out=embed, inp=inner),
            *([Weight(name="x.bias", out=gates, init="const", role="bias")] if self.bias else []),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.out_bias else []),
            # once per sequence: `cost` counts them
            *(Weight(name=f"{name}.weight", out=inner, inp=("encoder",), used=Fraction(0)) for name in self.start()),
            *(Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in self.start() if self.bias),
            Weight(name="u", batch=("heads",), out=("gates", "head"), inp=("head",)),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.zeros(scope.size("heads", "gates", "head"), dtype=torch.float64)

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        names = (*self.states, *self.start())
        return [State(name=name, axes=("heads", "head"), per="sequence", at_least_fp32=True) for name in names]

    def taps(self, scope: Scope) -> Mapping[str, str]:
        begins = {tap_of(name) for name in self.start()}  # is read where a sequence begins, and not after a token
        return {name: axes for name, axes in super().taps(scope).items() if name not in begins}

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = 2 * scope.size("encoder", "heads", "head") * len(self.start()) if self.from_encoder else 0
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        inner = self.inner or scope.size("embed")
        if inner % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the state of size {inner}", "or set `inner`")]
        if self.from_encoder and ("encoder" not in scope.sizes or scope.drafts):
            return [Problem("from_encoder", "there is no encoder to start from here", "give the model an `encoder:`")]
        return []


class CellProof(Proof, of=Cell):
    """Sampled values and exceptions."""

    samples = {
        "inner": [20, 12],
        "heads": [1, 2, 4],
        "bias": [True, False],
        "out_bias": [False, True],
        "from_encoder": [False, True],
    }

    def excepts(self, part: Cell, scope: Scope) -> dict[str, str]:
        return {"invariant": "the recurrent matrix multiplies the states of all rows at once, token by token"}


class CellModule(RecurrentModule, of=Cell):
    """u (rows, n, embed) -> like u."""

    part: Cell
    x: Linear
    o: Linear
    u: Tensor

    def setup(self) -> None:
        self.head, self.starts = self.scope.size("head"), self.part.from_encoder

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        x = ctx.tap(self, "x", self.x(x, ctx).unflatten(-1, (-1, self.part.gates * self.head)))
        start = self.start(seq, ctx, carry) if self.starts else ()
        if start and seq.begins:
            carry = tuple(state[:, 0] for state in start)
        elif carry is None:
            carry = (x.new_zeros(x.shape[0], x.shape[2], self.head),) * len(self.part.states)
        h, carry = unroll(self.part.step, x, self.u, self.recurrent_bias(), seq, carry[: len(self.part.states)], start)
        h = ctx.tap(self, "h", h)
        return ctx.tap(self, "out", self.o(h.flatten(-2), ctx)), (*carry, *(state[:, -1] for state in start))

    def start(self, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> Carry:
        """The states (rows, 1 or n, heads, head) that documents start from: in a whole pass from the ctx, else as stored at
        admission."""
        if ctx.encoder_output is None and carry is not None:
            return tuple(state[:, None] for state in carry[len(self.part.states) :])
        return self.start_of(last_of_source(ctx), ctx, seq)

    def start_of(self, last: Tensor, ctx: Ctx, seq: SequenceRows | None = None) -> Carry:
        """The states of encoder outputs (rows, 1 or n, encoder), or those of a flat batch (n, encoder)."""
        states = [torch.tanh(self.modules_named(name)(last, ctx)).unflatten(-1, (-1, self.head)) for name in self.part.start()]
        return tuple(states) if seq is None or last.dim() > 2 else tuple(seq.spread(state) for state in states)

    def fill(self, ctx: Ctx, view: StateView) -> None:
        """At admission: store the states that the sequences start from."""
        ctx = dc.replace(ctx, layout=ctx.encoder_layout)
        start = [state[:, 0] for state in self.start_of(last_of_source(ctx), ctx)]
        assert ctx.encoder_output is not None
        view.write(ctx.encoder_output, *map(torch.zeros_like, start), *start)

    def recurrent_bias(self) -> Tensor | None:
        """(heads, gates·head) added to U h; None: nothing."""
        return None


@register("rnn")
class Rnn(Cell):
    """Elman RNN: h = tanh(x + U h) (Elman 1990)."""


@register("lstm")
class Lstm(Cell):
    """LSTM: a second state c that gates scale and add to, so gradients reach far back (Hochreiter & Schmidhuber 1997)."""

    gates: ClassVar[int] = 4
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    step: ClassVar[Step] = staticmethod(lstm_step)

    def constant(self, name: str, scope: Scope) -> Tensor:
        start = super().constant(name, scope).view(scope.size("heads"), self.gates, -1)
        start[:, 1] = 1.0  # the forget gate starts open (Gers et al. 2000)
        return start.flatten()


@register("gru")
class Gru(Cell):
    """GRU: one gate mixes the state with a candidate (Cho et al. 2014; the reset gate acts after U, as in torch)."""

    gates: ClassVar[int] = 3
    step: ClassVar[Step] = staticmethod(gru_step)

    def weights(self, scope: Scope) -> list[Weight]:
        bias = [Weight(name="held_bias", out=("heads", "head"), init="zeros", role="bias")]
        return super().weights(scope) + (bias if self.bias else [])


class GruModule(CellModule, of=Gru):
    """The GRU has one bias of its own, which the reset gate scales; all others are in x."""

    held_bias: Tensor

    def recurrent_bias(self) -> Tensor | None:
        return F.pad(self.held_bias.unflatten(0, (-1, self.head)), (2 * self.head, 0)) if self.part.bias else None
