"""ShortConv: a gated convolution over the last few tokens, the mixer of LFM2.

    b, c, u = x W_b, x W_c, x W_u          y = c ∘ conv(b ∘ u)          out = y W_o

The convolution is causal and per channel; nothing else mixes tokens, so that the state is its last inputs.

Shapes: x (rows, n, embed)   b, c, u, y (rows, n, inner).          Liquid AI 2025 (LFM2); Poli et al. 2023 (gated convolutions)
"""

from __future__ import annotations

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, multiply_fused
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule, conv_state
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.conv import causal_conv
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

READ = ("b", "c", "u")  # the projections of the input


@register("short_conv")
class ShortConv(Recurrent):
    """A short causal convolution per channel, gated before and after."""

    TAPS = {"b": "pos channel", "c": "pos channel", "u": "pos channel", "y": "pos channel", "out": "pos channel"}

    inner: int | None = bounded(None, above=0, widens=True)  # None: the width
    conv_size: int = bounded(3, at_least=2, remedy="a kernel of 1 mixes no tokens")  # tokens under the convolution
    bias: bool = False  # of the projections and of the convolution

    tp_region = True

    def axes(self, scope: Scope) -> Scope:
        inner = scope.size("embed") if self.inner is None else self.inner
        return scope.add(inner=inner, taps=self.conv_size, conv_state=self.conv_size - 1)

    def weights(self, scope: Scope) -> list[Weight]:
        inner, embed = ("inner",), ("embed",)
        zeros = [Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in READ]
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=embed) for name in READ),
            *(zeros if self.bias else []),
            Weight(name="conv", out=inner, inp=("taps",), role="conv"),
            *([Weight(name="conv_bias", out=inner, init="zeros", role="bias")] if self.bias else []),
            Weight(name="o.weight", out=embed, inp=inner),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.bias else []),
        ]

    def state(self, scope: Scope) -> list[State]:
        return [conv_state("conv", "inner")] if scope.decodes else []


class ShortConvProof(Proof, of=ShortConv):
    """Sampled values and causes."""

    causes = {"bias": FieldCause("bias missing")}
    samples = {"inner": [28, 20], "conv_size": [3, 4], "bias": [False, True]}


class ShortConvModule(RecurrentModule, of=ShortConv):
    """x (rows, n, embed) -> like x."""

    part: ShortConv
    fused = READ
    b: Linear
    c: Linear
    u: Linear
    o: Linear
    conv: Tensor
    conv_bias: Tensor

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        b, c, u = multiply_fused(x, ctx, self.fused_weight, self.b, self.c, self.u)
        b, c, u = ctx.tap(self, "b", b), ctx.tap(self, "c", c), ctx.tap(self, "u", u)
        bias = self.conv_bias if self.part.bias else None
        mixed, last = causal_conv(b * u, self.conv, bias, seq, None if carry is None else carry[0])
        y = ctx.tap(self, "y", c * mixed)
        return ctx.tap(self, "out", self.o(y, ctx)), (last,)
