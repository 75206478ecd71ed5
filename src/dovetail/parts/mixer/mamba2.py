"""Mamba-2 (SSD): a selective state space with one decay per head, computed by matmuls over chunks.

    z, x, B, C, Δ = u W_z, conv(u W_x), conv(u W_B), conv(u W_C), softplus(u W_Δ + b)      conv: short, causal, then silu
    S_t = e^{−Δ_t A} S_{t−1} + B_t (Δ_t x_t)ᵀ          y_t = S_tᵀ C_t + D x_t          out = norm(y ∘ silu(z)) W_o

A is positive, one per head, stored as log A. Heads share B and C within a group, as in GQA. Δ may be clamped to dt_min
and dt_max. `multipliers` are fixed factors of the five projections (Falcon-H1, as in µP). The norm may be over each group of
heads (`norm.groups`; Nemotron-H), come before the gate, out = (norm(y) ∘ silu(z)) W_o, or be left out.

Shapes: u (rows, n, embed)   x, z, y (rows, n, heads, head)   B, C (rows, n, groups, state)   S (rows, heads, state, head).
Dao & Gu 2024; Zuo et al. 2025 (Falcon-H1). Statistics of a norm over all heads are all-reduced under tensor parallel.
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Norm
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module, at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule, conv_state
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.conv import causal_conv
from dovetail.ops.scan.decay import decay_flops, decay_scan
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Part, Problem, broken, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

LARGEST_STEP, SMALLEST_STEP = 0.1, 0.001  # Δ is initialized between these, evenly in its logarithm
LARGEST_A = 16.0  # A is initialized from 1 to this
PROJECTIONS = ("z", "x", "b", "c", "dt")  # in the order of `multipliers`


@register("mamba2")
class Mamba2(Recurrent):
    """Mamba-2: a selective state space with one decay per head, computed by matmuls."""

    TAPS = {
        "x": "pos head channel",
        "b": "pos group state",
        "c": "pos group state",
        "dt": "pos head",
        "y": "pos head channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    inner: int | None = bounded(None, above=0, widens=True)  # None: twice the width
    head: int = bounded(64, above=0)
    state_size: int = bounded(128, above=0)
    groups: int = bounded(1, above=0)
    conv_size: int = bounded(4, at_least=2, remedy="a kernel of 1 mixes no tokens")  # tokens under the convolution
    bias: bool = False
    conv_bias: bool = True
    multipliers: tuple[float, ...] = bounded((1.0,) * len(PROJECTIONS), above=0, at_most=MAX_FACTOR)  # of z, x, B, C, Δ
    dt_min: float = bounded(0.0, at_least=0, at_most=MAX_FACTOR)  # the least Δ
    dt_max: float | None = bounded(None, above=0, at_most=MAX_FACTOR, remedy="use null for none")  # the greatest Δ
    norm: Norm | None = child("rmsnorm")
    norm_before_gate: bool = False

    tp_region = True
    values = "x"

    def axes(self, scope: Scope) -> Scope:
        inner = self.inner or 2 * scope.size("embed")
        sizes = {"heads": inner // max(self.head, 1), "head": self.head, "groups": self.groups, "state": self.state_size}
        return scope.add(**sizes, taps=self.conv_size, conv_state=self.conv_size - 1)

    def children(self) -> dict[str, Part]:
        return {} if self.norm is None else {"norm": self.norm}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim=("heads", "head"))

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner, shared = ("embed",), ("heads", "head"), ("groups", "state")
        projections = {"z": inner, "x": inner, "b": shared, "c": shared}
        biased = projections if self.bias else {}
        return [
            *(Weight(name=f"{name}.weight", out=out, inp=embed) for name, out in projections.items()),
            Weight(name="dt.weight", out=("heads",), inp=embed),
            Weight(name="o.weight", out=embed, inp=inner),
            *(Weight(name=f"{name}.bias", out=out, init="zeros", role="bias") for name, out in biased.items()),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.bias else []),
            *(
                weight
                for name in "xbc"
                for weight in (
                    Weight(name=f"conv_{name}", out=projections[name], inp=("taps",), role="conv"),
                    Weight(name=f"conv_{name}_bias", out=projections[name], init="zeros", role="bias"),
                )[: 2 if self.conv_bias else 1]
            ),
            Weight(name="dt_bias", out=("heads",), init="const", role="bias"),  # Δ always has its own bias
            Weight(name="a_log", out=("heads",), init="const", role="gate"),
            Weight(name="skip", out=("heads",), init="ones", role="gate"),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        heads = scope.size("heads")
        if name == "a_log":
            return torch.linspace(1.0, LARGEST_A, heads, dtype=torch.float64).log()
        low, high = (torch.tensor(step).log10() for step in (SMALLEST_STEP, LARGEST_STEP))
        steps = torch.logspace(low, high, heads, dtype=torch.float64)
        return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        convolved = [("x", ("heads", "head")), ("b", ("groups", "state")), ("c", ("groups", "state"))]
        conv_states = [conv_state(f"conv_{name}", *channels) for name, channels in convolved]
        return [*conv_states, State(name="state", axes=("heads", "state", "head"), per="sequence", at_least_fp32=True)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = decay_flops(n, scope.size("heads"), scope.size("state"), scope.size("head"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        inner = self.inner or 2 * scope.size("embed")
        if inner % self.head:
            return [Problem("head", f"{self.head} does not divide the inner width, {inner}", "or set `inner`")]
        if (inner // self.head) % self.groups:
            return [Problem("groups", f"{self.groups} does not divide {inner // self.head} heads")]
        names, greatest = ", ".join(PROJECTIONS), inf if self.dt_max is None else self.dt_max
        count, wanted = len(self.multipliers), len(PROJECTIONS)
        no_norm = self.norm_before_gate and self.norm is None
        return broken(
            (count != wanted, "multipliers", f"there are {count}, not {wanted}", f"give one each for {names}"),
            (self.dt_min >= greatest, "dt_min", f"{self.dt_min:g} is not below dt_max, {greatest:g}", ""),
            (no_norm, "norm_before_gate", "there is no norm", "set `norm`, or leave this false"),
        )


class Mamba2Proof(Proof, of=Mamba2):
    """Sampled values."""

    samples = {
        "inner": [60, 36],
        "head": [6, 3],
        "state_size": [5, 8],
        "groups": [1, 2],
        "conv_size": [4, 3],
        "bias": [False, True],
        "conv_bias": [True, False],
        "multipliers": [[1.0] * len(PROJECTIONS), [0.5, 1.4, 0.7, 1.3, 0.9]],
        "dt_min": [0.0, 0.005],
        "dt_max": [None, 0.06],
        "norm_before_gate": [False, True],
    }


class Mamba2Module(RecurrentModule, of=Mamba2):
    """u (rows, n, embed) -> like u."""

    part: Mamba2
    z: Linear
    x: Linear
    b: Linear
    c: Linear
    dt: Linear
    o: Linear
    norm: Module
    dt_bias: Tensor
    a_log: Tensor
    skip: Tensor

    def setup(self) -> None:
        self.head, self.state_size = self.part.head, self.part.state_size
        self.factors: dict[str, float] = dict(zip(PROJECTIONS, self.part.multipliers, strict=True))
        self.clamps = self.part.dt_min > 0 or self.part.dt_max is not None

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        u, (conv_x, conv_b, conv_c, state) = x, carry or (None,) * 4
        x, conv_x = self.convolved("x", self.projected("x", u, ctx), self.head, seq, ctx, conv_x)
        b, conv_b = self.convolved("b", self.projected("b", u, ctx), self.state_size, seq, ctx, conv_b)
        c, conv_c = self.convolved("c", self.projected("c", u, ctx), self.state_size, seq, ctx, conv_c)
        dtype = at_least_fp32(u.dtype)
        dt = F.softplus(self.projected("dt", u, ctx, dtype) + self.dt_bias)
        dt = ctx.tap(self, "dt", dt.clamp(self.part.dt_min, self.part.dt_max) if self.clamps else dt)
        log_decay = -self.a_log.to(dtype).exp() * dt
        y, state = decay_scan(c, b, x.to(dtype) * dt[..., None], log_decay, seq, state)  # in float16 a small dt underflows
        y = ctx.tap(self, "y", y + self.skip[:, None] * x)
        gated = self.gated(y.flatten(-2), ctx.tap(self, "gate", self.projected("z", u, ctx)), ctx)
        return ctx.tap(self, "out", self.o(gated, ctx)), (conv_x, conv_b, conv_c, state)

    def projected(self, name: str, u: Tensor, ctx: Ctx, dtype: torch.dtype | None = None) -> Tensor:
        """One of the five projections of u (rows, n, embed), times its multiplier, multiplied in `dtype`."""
        y, factor = getattr(self, name)(u, ctx), self.factors[name]
        y = y if dtype is None else y.to(dtype)
        return y if factor == 1.0 else y * factor

    def gated(self, y: Tensor, z: Tensor, ctx: Ctx) -> Tensor:
        """y (rows, n, heads·head), gated by z and normalized."""
        if self.part.norm is None:
            return y * F.silu(z)
        return self.norm(y, ctx) * F.silu(z) if self.part.norm_before_gate else self.norm(y * F.silu(z), ctx)

    def convolved(
        self, name: str, x: Tensor, size: int, seq: SequenceRows, ctx: Ctx, conv_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x (rows, n, count·size) convolved (rows, n, count, size), and the new conv state (rows, count, size, taps − 1)."""
        bias = getattr(self, f"conv_{name}_bias") if self.part.conv_bias else None
        before = None if conv_state is None else conv_state.flatten(1, 2)
        y, conv_state = causal_conv(x, getattr(self, f"conv_{name}"), bias, seq, before)
        return ctx.tap(self, name, F.silu(y).unflatten(-1, (-1, size))), conv_state.unflatten(1, (-1, size))
