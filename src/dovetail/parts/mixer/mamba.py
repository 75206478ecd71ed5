"""Mamba: a selective state space (S6) per channel; step size, input and output matrices depend on the token.

    z, x = u W_z, silu(conv(u W_x))          r, B, C = x W_r, x W_B, x W_C          Δ = softplus(r W_Δ + b)
    h_t = e^{Δ_t A} ∘ h_{t−1} + (Δ_t x_t) B_tᵀ          y_t = h_t C_t + D x_t          out = (y ∘ silu(z)) W_o

A is negative, one value per channel and state dimension, stored as log(−A). Jamba normalizes r, B and C.

Shapes: u (rows, n, embed)   x, z, Δ, y (rows, n, inner)   r (rows, n, rank)   B, C (rows, n, state)   h (rows, inner, state).
Gu & Dao 2023. Tensor parallel shards the channels; r, B and C sum over all channels, so they are all-reduced.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Norm
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule, conv_state
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.conv import causal_conv
from dovetail.ops.scan.selective import selective_flops, selective_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

LARGEST_STEP, SMALLEST_STEP = 0.1, 0.001  # Δ is initialized between these, evenly in its logarithm
SELECTED = {"low": "rank", "b": "state", "c": "state"}  # r, B and C: the projections of x, with their axes


@register("mamba")
class Mamba(Recurrent):
    """Mamba: a selective state space with one decay per channel and state dimension."""

    TAPS = {
        "x": "pos channel",
        "b": "pos state",
        "c": "pos state",
        "dt": "pos channel",
        "y": "pos channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    inner: int | None = bounded(None, above=0, widens=True)  # None: twice the width
    state_size: int = bounded(16, above=0)
    rank: int | None = bounded(None, above=0, widens=True)  # of the projection to Δ; None: width / 16, rounded up
    conv_size: int = bounded(4, at_least=2, remedy="a kernel of 1 mixes no tokens")  # tokens under the convolution
    bias: bool = False
    conv_bias: bool = True
    norm: Norm | None = None  # of r, B and C

    tp_region = True
    values = "x"

    def axes(self, scope: Scope) -> Scope:
        width = scope.size("embed")
        sizes = {"inner": self.inner or 2 * width, "state": self.state_size, "rank": self.rank or -(-width // 16)}
        return scope.add(**sizes, taps=self.conv_size, conv_state=self.conv_size - 1)

    def children(self) -> dict[str, Part]:
        return {} if self.norm is None else {f"{name}_norm": self.norm for name in SELECTED}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim=SELECTED[child.removesuffix("_norm")])

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner = ("embed",), ("inner",)
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=embed) for name in ("z", "x")),
            *(Weight(name=f"{name}.weight", out=(axis,), inp=inner, tp="reduce") for name, axis in SELECTED.items()),
            Weight(name="dt.weight", out=inner, inp=("rank",)),
            Weight(name="o.weight", out=embed, inp=inner),
            *(Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in ("z", "x") if self.bias),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.bias else []),
            Weight(name="conv", out=inner, inp=("taps",), role="conv"),
            *([Weight(name="conv_bias", out=inner, init="zeros", role="bias")] if self.conv_bias else []),
            Weight(name="dt_bias", out=inner, init="const", role="bias"),
            Weight(name="a_log", out=inner, inp=("state",), init="const", role="gate"),
            Weight(name="skip", out=inner, init="ones", role="gate"),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        inner = scope.size("inner")
        if name == "a_log":
            return torch.arange(1, self.state_size + 1, dtype=torch.float64).log().repeat(inner, 1)
        low, high = (torch.tensor(step).log10() for step in (SMALLEST_STEP, LARGEST_STEP))
        steps = torch.logspace(low, high, inner, dtype=torch.float64)
        return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        return [conv_state("conv", "inner"), State(name="state", axes=("inner", "state"), per="sequence", at_least_fp32=True)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = selective_flops(n, scope.size("inner"), scope.size("state"))
        return flops, flops


class MambaProof(Proof, of=Mamba):
    """Sampled values and exceptions."""

    samples = {
        "inner": [60, 36],
        "state_size": [5, 8],
        "rank": [3, 7],
        "conv_size": [4, 3],
        "bias": [False, True],
        "conv_bias": [True, False],
    }

    def excepts(self, part: Mamba, scope: Scope) -> dict[str, str]:
        return {"invariant": "the scan decays the channels of all rows at once, token by token"}


class MambaModule(RecurrentModule, of=Mamba):
    """u (rows, n, embed) -> like u."""

    part: Mamba
    z: Linear
    x: Linear
    low: Linear
    b: Linear
    c: Linear
    dt: Linear
    o: Linear
    conv: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    a_log: Tensor
    skip: Tensor

    def setup(self) -> None:
        self.sizes = [self.scope.size(axis) for axis in SELECTED.values()]

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        u, (conv_state, state) = x, carry or (None, None)
        bias = self.conv_bias if self.part.conv_bias else None
        x, conv_state = causal_conv(self.x(u, ctx), self.conv, bias, seq, conv_state)
        x = ctx.tap(self, "x", F.silu(x))
        low, b, c = self.selected(x, ctx)
        b, c = ctx.tap(self, "b", b), ctx.tap(self, "c", c)
        dtype = at_least_fp32(u.dtype)
        dt = ctx.tap(self, "dt", F.softplus(self.dt(low, ctx).to(dtype) + self.dt_bias))
        y, state = selective_scan(x, dt, -self.a_log.to(dtype).exp(), b, c, seq, state)
        y = ctx.tap(self, "y", y + self.skip * x)
        return ctx.tap(self, "out", self.o(y * F.silu(ctx.tap(self, "gate", self.z(u, ctx))), ctx)), (conv_state, state)

    def selected(self, x: Tensor, ctx: Ctx) -> list[Tensor]:
        """r, B and C (rows, n, rank or state) of x (rows, n, inner), each a sum over all channels."""
        projected = torch.cat([self.low(x, ctx), self.b(x, ctx), self.c(x, ctx)], -1)
        each = list(ctx.ranks.all_reduce(projected, ("inner",)).split(self.sizes, -1))
        if self.part.norm is not None:
            each = [self.modules_named(f"{name}_norm")(y, ctx) for name, y in zip(SELECTED, each, strict=True)]
        return each
