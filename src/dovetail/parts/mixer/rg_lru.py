"""RG-LRU: a real-gated linear recurrent unit behind a short convolution, the recurrent block of Griffin and RecurrentGemma.

    x = conv(u W_x)          r, i = σ(x R + b_r), σ(x I + b_i)          a = e^{−8 r softplus(Λ)}
    h_t = a_t ∘ h_{t−1} + √(1 − a_t²) ∘ i_t ∘ x_t          out = (h ∘ gelu(u W_y)) W_o

R and I are block-diagonal, one block per head. √(1 − a²) keeps the size of h, whatever the decay. At the first token of a
document, where h is zero, the factor is 1 instead.

Shapes: u (rows, n, embed)   x, r, i, a, h (rows, n, heads, head)   R, I (heads, head, head)   Λ (heads, head).  De et al. 2024
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, multiply_fused
from dovetail.nn.module import at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule, conv_state
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.conv import causal_conv
from dovetail.ops.scan.decay import decay_flops, decay_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

SHARPNESS = 8.0  # c of the paper: how fast an open gate forgets
SLOWEST, FASTEST = 0.999, 0.9  # the decays of an open gate at first, evenly between
SMALLEST = 1e-6  # below this 1 − a² is not resolved; it bounds the gradient of the square root


READ = ("x", "y")  # the projections of the input


@register("rg_lru")
class RgLru(Recurrent):
    """Real-gated linear recurrent unit (Griffin, RecurrentGemma)."""

    TAPS = {
        "x": "pos head channel",
        "decay": "pos head channel",
        "h": "pos head channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)  # blocks of the gates
    inner: int | None = bounded(None, above=0, widens=True)  # None: the width
    conv_size: int = bounded(4, at_least=2, remedy="a kernel of 1 mixes no tokens")  # tokens under the convolution
    bias: bool = True  # of the projections

    tp_region = True

    def axes(self, scope: Scope) -> Scope:
        inner = scope.size("embed") if self.inner is None else self.inner
        sizes = {"heads": self.heads, "head": inner // max(self.heads, 1)}
        return scope.add(**sizes, taps=self.conv_size, conv_state=self.conv_size - 1)

    def weights(self, scope: Scope) -> list[Weight]:
        inner, embed = ("heads", "head"), ("embed",)
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=embed) for name in READ),
            *(Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in READ if self.bias),
            Weight(name="conv", out=inner, inp=("taps",), role="conv"),
            Weight(name="conv_bias", out=inner, init="zeros", role="bias"),
            *(Weight(name=name, batch=("heads",), out=("head",), inp=("head",)) for name in ("r", "i")),
            *(Weight(name=f"{name}_bias", batch=("heads",), out=("head",), init="zeros", role="bias") for name in ("r", "i")),
            Weight(name="decay", batch=("heads",), out=("head",), init="const", role="gate"),
            Weight(name="o.weight", out=embed, inp=inner),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.bias else []),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        decays = torch.linspace(FASTEST, SLOWEST, scope.size("heads", "head"), dtype=torch.float64)
        return torch.log(torch.expm1(-decays.log() / SHARPNESS)).unflatten(0, (scope.size("heads"), -1))  # of softplus

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        return [
            conv_state("conv", "heads", "head"),
            State(name="state", axes=("heads", "head"), per="sequence", at_least_fp32=True),
        ]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = decay_flops(n, scope.size("heads", "head"), 1, 1)
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        inner = scope.size("embed") if self.inner is None else self.inner
        if inner % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the {inner} channels", "or set `inner`")]
        return []


class RgLruProof(Proof, of=RgLru):
    """Sampled values and causes."""

    causes = {"bias": FieldCause("bias missing")}
    samples = {"heads": [4, 2], "inner": [28, 20], "conv_size": [4, 3], "bias": [True, False]}


class RgLruModule(RecurrentModule, of=RgLru):
    """u (rows, n, embed) -> like u."""

    part: RgLru
    fused = READ
    x: Linear
    y: Linear
    o: Linear
    conv: Tensor
    conv_bias: Tensor
    r: Tensor
    r_bias: Tensor
    i: Tensor
    i_bias: Tensor
    decay: Tensor

    def setup(self) -> None:
        self.head = self.scope.size("head")

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        x, gate = multiply_fused(x, ctx, self.fused_weight, self.x, self.y)
        last, h = (None, None) if carry is None else (carry[0].flatten(1, 2), carry[1])
        x, last = causal_conv(x, self.conv, self.conv_bias, seq, last)
        x = ctx.tap(self, "x", x.unflatten(-1, (-1, self.head)))
        log_a, added = self.gated(x, ctx.layout.order, seq, ctx)
        ones = added.new_ones(*added.shape[:2], 1, 1)  # every channel is a head with one value, and one key that is always read
        scanned, h = decay_scan(
            ones, ones, added.flatten(2)[..., None], log_a.flatten(2), seq, None if h is None else h.flatten(1)[..., None, None]
        )
        y = ctx.tap(self, "h", scanned[..., 0].to(x.dtype).unflatten(-1, (-1, self.head))).flatten(-2)
        out = self.o(y * F.gelu(ctx.tap(self, "gate", gate), approximate="tanh"), ctx)
        return ctx.tap(self, "out", out), tuple(state.unflatten(1, (-1, self.head)) for state in (last, h[..., 0, 0]))

    def gated(self, x: Tensor, order: Tensor, seq: SequenceRows, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """log a, and what a token adds to h, both (rows, n, heads, head) in float32 or wider."""
        dtype = at_least_fp32(x.dtype)
        x = x.to(dtype)
        r, i = (
            torch.sigmoid(torch.einsum("...hd,hed->...he", x, gate.to(dtype)) + bias.to(dtype))
            for gate, bias in ((self.r, self.r_bias), (self.i, self.i_bias))
        )
        log_a = ctx.tap(self, "decay", -SHARPNESS * r * F.softplus(self.decay.to(dtype)))
        first = (seq.spread(order) == 0)[..., None, None]
        factor = torch.where(first, torch.ones_like(log_a), (-torch.expm1(2 * log_a)).clamp_min(SMALLEST).sqrt())
        return log_a, factor * i * x
