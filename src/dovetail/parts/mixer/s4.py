"""S4, in its diagonal form: a linear state space a channel that remembers a long past, the same for every token.

    x = u W_x          h' = A h + B x,   y = 2 Re(C h) + D x          out = act(y) W_o

A is diagonal and complex; numbers that come in conjugate pairs are kept once, hence 2 Re. Only the product B C counts, so
B is 1. Time is cut in steps Δ of each channel's own:

    zoh        ā = e^{ΔA},  b̄ = (ā − 1)/A                  bilinear   ā = (1 + ΔA/2)/(1 − ΔA/2),  b̄ = Δ/(1 − ΔA/2)

Where A starts decides what is remembered. HiPPO-LegS keeps the whole past, as coefficients of Legendre polynomials over it:

    A[n, k] = −√((2n+1)(2k+1)) for n > k, −(n+1) for n = k, 0 above          A + P Pᵀ = −½ + S,  Sᵀ = −S,  P = √(n + ½)

`legs` starts with the eigenvalues of that normal part, −½ + S; `lin` and `inv` with formulas near them.

Shapes: u (rows, n, embed)   x, y (rows, n, inner)   A, C (inner, state) complex, as real pairs   h (rows, inner, state, pair).
Gu, Goel & Ré 2022 (S4); Gupta et al. 2022; Gu et al. 2022 (S4D: on the parameterisation).
"""

from __future__ import annotations

from math import log, pi
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Act
from dovetail.core.module import Linear, Module
from dovetail.core.part import Problem, child, register
from dovetail.core.recur import Carry, Recurrent, RecurrentModule
from dovetail.core.rows import SequenceRows
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight
from dovetail.ops.scan.space import space_flops, space_scan

FASTEST, SLOWEST = 0.1, 0.001  # the first steps Δ, spread evenly in their logarithm


def hippo_legs(size: int) -> Tensor:
    """(size, size) the HiPPO-LegS matrix."""
    n = torch.arange(size, dtype=torch.float64)
    outer = ((2 * n[:, None] + 1) * (2 * n + 1)).sqrt()
    return -outer.tril(-1) - torch.diag(n + 1)


def first_turns(start: Literal["legs", "lin", "inv"], count: int) -> Tensor:
    """(count,) imaginary parts of the first A, above 0; the real parts are all −½."""
    n = torch.arange(count, dtype=torch.float64)
    if start == "lin":
        return pi * n
    size = 2 * count
    if start == "inv":
        return size / pi * (size / (2 * n + 1) - 1)
    legs = hippo_legs(size)  # −½ and a skew part, once P Pᵀ is added; that is symmetric, so the skew part is its own already
    skew = (legs - legs.T) / 2
    return torch.linalg.eigvalsh(skew * -1j)[count:]


@register("s4")
class S4(Recurrent):
    """A linear state space a channel: a convolution with a kernel as long as the text."""

    TAPS = ("x", "y", "out")

    inner: int | None = None  # None: the width
    state_size: int = 32  # complex numbers a channel
    start: Literal["legs", "lin", "inv"] = "legs"
    discretization: Literal["zoh", "bilinear"] = "zoh"
    bias: bool = False
    act: Act = child("gelu")

    def module(self) -> type[Module]:
        return S4Module

    def axes(self, scope: Scope) -> Scope:
        return scope.add(inner=self.inner or scope.size("embed"), state=self.state_size, pair=2)

    def weights(self, scope: Scope) -> list[Weight]:
        stream, inner, state = ("embed",), ("inner",), ("state",)
        declared = [Weight(name="x.weight", out=inner, inp=stream), Weight(name="o.weight", out=stream, inp=inner)]
        if self.bias:
            declared += [Weight(name="x.bias", out=inner, init="zeros", role="bias")]
            declared += [Weight(name="o.bias", out=stream, init="zeros", role="bias", tp="once")]
        declared += [Weight(name=name, out=inner, inp=state, init="const", role="gate") for name in ("decay_log", "turn")]
        declared += [Weight(name="c", out=inner, inp=("state", "pair"), role="gate")]
        declared += [Weight(name="step_log", out=inner, init="const", role="gate")]
        return [*declared, Weight(name="skip", out=inner, init="ones", role="gate")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        inner = scope.size("inner")
        if name == "step_log":
            return torch.linspace(log(SLOWEST), log(FASTEST), inner, dtype=torch.float64)
        if name == "decay_log":
            return torch.full((inner, self.state_size), log(0.5), dtype=torch.float64)
        return first_turns(self.start, self.state_size).repeat(inner, 1)

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        return [State(name="memory", axes=("inner", "state", "pair"), per="sequence", at_least_fp32=True)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = space_flops(n, scope.size("inner"), scope.size("state"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        for name in ("inner", "state_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return [Problem(name, f"{value} is not above 0")]
        return []

    def tp_region(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {
            "inner": [20, 36],
            "state_size": [5, 3],
            "start": ["legs", "lin", "inv"],
            "discretization": ["zoh", "bilinear"],
            "bias": [False, True],
        }


class S4Module(RecurrentModule):
    """u (rows, n, embed) -> like u."""

    part: S4
    x: Linear
    o: Linear
    decay_log: Tensor
    turn: Tensor
    c: Tensor
    step_log: Tensor
    skip: Tensor

    def setup(self) -> None:
        self.act = self.part.act.function()

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        x = ctx.tap(self, "x", self.x(x))
        memory = None if carry is None else torch.view_as_complex(carry[0].contiguous())
        y, memory = space_scan(x, *self.discrete(), seq, memory)
        y = ctx.tap(self, "y", y + self.skip * x)
        return ctx.tap(self, "out", self.o(self.act(y))), (torch.view_as_real(memory),)

    def discrete(self) -> tuple[Tensor, Tensor, Tensor]:
        """log ā, b̄ and 2 C (inner, state), in complex128: rounding here would be raised to the n-th power."""
        a = torch.complex(-self.decay_log.double().exp(), self.turn.double())
        step = self.step_log.double().exp()[:, None]
        c = 2 * torch.view_as_complex(self.c.double().unflatten(-1, (-1, 2)))
        if self.part.discretization == "zoh":
            return step * a, torch.expm1(step * a) / a, c
        half = step * a / 2
        return torch.log((1 + half) / (1 - half)), step / (1 - half), c
