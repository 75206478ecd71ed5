"""S4 in its diagonal form (S4D): a linear time-invariant state space per channel, with a long memory.

    x = u W_x          h' = A h + B x,   y = 2 Re(C h) + D x          out = act(y) W_o

A is diagonal and complex; of each conjugate pair one value is stored, hence 2 Re. Only the product B C matters, so B is 1.
Each channel has its own step size Δ:

    zoh        ā = e^{ΔA},  b̄ = (ā − 1)/A                  bilinear   ā = (1 + ΔA/2)/(1 − ΔA/2),  b̄ = Δ/(1 − ΔA/2)

The initial A decides what the state stores. HiPPO-LegS stores the whole past, as coefficients of Legendre polynomials over it:

    A[n, k] = −√((2n+1)(2k+1)) for n > k, −(n+1) for n = k, 0 above          A + P Pᵀ = −½ + S,  Sᵀ = −S,  P = √(n + ½)

`legs` starts from the eigenvalues of that normal part, −½ + S; `lin` and `inv` from formulas close to them.

Shapes: u (rows, n, embed)   x, y (rows, n, inner)   A, C (inner, state) complex, as real pairs   h (rows, inner, state, pair).
Gu, Goel & Ré 2022 (S4); Gupta et al. 2022 (DSS); Gu et al. 2022 (S4D).
"""

from __future__ import annotations

from math import log, pi
from typing import Literal

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act
from dovetail.nn.linear import Linear
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.state_space import space_flops, space_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

LARGEST_STEP, SMALLEST_STEP = 0.1, 0.001  # Δ is initialized between these, evenly in its logarithm
MAX_STATE = 512  # `legs` computes the eigenvalues of a matrix of twice this size


def hippo_legs(size: int) -> Tensor:
    """(size, size) the HiPPO-LegS matrix."""
    n = torch.arange(size, dtype=torch.float64)
    outer = ((2 * n[:, None] + 1) * (2 * n + 1)).sqrt()
    return -outer.tril(-1) - torch.diag(n + 1)


def initial_frequencies(start: Literal["legs", "lin", "inv"], count: int) -> Tensor:
    """(count,) imaginary parts of the initial A, at least 0; the real parts are all −½."""
    n = torch.arange(count, dtype=torch.float64)
    if start == "lin":
        return pi * n
    size = 2 * count
    if start == "inv":
        return size / pi * (size / (2 * n + 1) - 1)
    legs = hippo_legs(size)  # A + P Pᵀ = −½ + S; P Pᵀ is symmetric, so S is the skew part of A
    skew = (legs - legs.T) / 2
    return torch.linalg.eigvalsh(skew * -1j)[count:]


@register("s4")
class S4(Recurrent):
    """S4D: a linear state space per channel, a convolution with a kernel as long as the sequence."""

    TAPS = {"x": "pos channel", "y": "pos channel", "out": "pos channel"}

    inner: int | None = bounded(None, above=0, widens=True)  # None: the width
    state_size: int = bounded(32, above=0, at_most=MAX_STATE)  # complex values per channel
    start: Literal["legs", "lin", "inv"] = "legs"
    discretization: Literal["zoh", "bilinear"] = "zoh"
    bias: bool = False
    act: Act = child("gelu")

    tp_region = True
    values = "x"

    def axes(self, scope: Scope) -> Scope:
        return scope.add(inner=self.inner or scope.size("embed"), state=self.state_size, pair=2)

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner, state = ("embed",), ("inner",), ("state",)
        declared = [Weight(name="x.weight", out=inner, inp=embed), Weight(name="o.weight", out=embed, inp=inner)]
        if self.bias:
            declared += [Weight(name="x.bias", out=inner, init="zeros", role="bias")]
            declared += [Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")]
        declared += [Weight(name=name, out=inner, inp=state, init="const", role="gate") for name in ("decay_log", "turn")]
        declared += [Weight(name="c", out=inner, inp=("state", "pair"), role="gate")]
        declared += [Weight(name="step_log", out=inner, init="const", role="gate")]
        return [*declared, Weight(name="skip", out=inner, init="ones", role="gate")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        inner = scope.size("inner")
        if name == "step_log":
            return torch.linspace(log(SMALLEST_STEP), log(LARGEST_STEP), inner, dtype=torch.float64)
        if name == "decay_log":
            return torch.full((inner, self.state_size), log(0.5), dtype=torch.float64)
        return initial_frequencies(self.start, self.state_size).repeat(inner, 1)

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        return [State(name="state", axes=("inner", "state", "pair"), per="sequence", at_least_fp32=True)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = space_flops(n, scope.size("inner"), scope.size("state"))
        return flops, flops


class S4Proof(Proof, of=S4):
    """Sampled values."""

    samples = {
        "inner": [20, 36],
        "state_size": [5, 3],
        "start": ["legs", "lin", "inv"],
        "discretization": ["zoh", "bilinear"],
        "bias": [False, True],
    }


class S4Module(RecurrentModule, of=S4):
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
        self.act = self.part.act.function

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        x = ctx.tap(self, "x", self.x(x, ctx))
        state = None if carry is None else torch.view_as_complex(carry[0].contiguous())
        y, state = space_scan(x, *self.discrete(), seq, state)
        y = ctx.tap(self, "y", y + self.skip * x)
        return ctx.tap(self, "out", self.o(self.act(y), ctx)), (torch.view_as_real(state),)

    def discrete(self) -> tuple[Tensor, Tensor, Tensor]:
        """log ā, b̄ and 2 C (inner, state), in complex128: a rounding error here is raised to the n-th power."""
        a = torch.complex(-self.decay_log.double().exp(), self.turn.double())
        step = self.step_log.double().exp()[:, None]
        c = 2 * torch.view_as_complex(self.c.double().unflatten(-1, (-1, 2)))
        if self.part.discretization == "zoh":
            return step * a, torch.expm1(step * a) / a, c
        half = step * a / 2
        return torch.log((1 + half) / (1 - half)), step / (1 - half), c
