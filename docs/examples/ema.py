"""EMA: each channel is an exponential moving average of the past, with a decay that it learns.

    v_t = W_v x_t          h_t = a ∘ h_{t−1} + (1 − a) ∘ v_t          y_t = W_o (h_t ∘ silu(W_g x_t))          a = σ(decay)

Shapes: x (rows, n, embed)   v, h (rows, n, inner)   a (inner,)   state h (rows, inner).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.module import Linear, at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule
from dovetail.nn.rows import SequenceRows
from dovetail.proof.laws.oracle import Comparison, alone, ctx, oracle, part
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


@register("ema")
class Ema(Recurrent):
    """A gated moving average per channel."""

    TAPS = {"v": "pos channel", "h": "pos channel", "out": "pos channel"}

    inner: int = bounded(64, above=0)  # channels of the state

    tp_region = True

    def axes(self, scope: Scope) -> Scope:
        return scope.add(inner=self.inner)

    def weights(self, scope: Scope) -> list[Weight]:
        inner, embed = ("inner",), ("embed",)
        return [
            Weight(name="v.weight", out=inner, inp=embed),
            Weight(name="gate.weight", out=inner, inp=embed),
            Weight(name="decay", out=inner, init="const", role="gate"),
            Weight(name="o.weight", out=embed, inp=inner),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.linspace(-2.0, 4.0, scope.size("inner"), dtype=torch.float64)  # averages over 1 to 50 tokens

    def state(self, scope: Scope) -> list[State]:
        return [State(name="h", axes=("inner",), per="sequence", at_least_fp32=True)] if scope.decodes else []


class EmaProof(Proof, of=Ema):
    """Sampled values."""

    samples = {"inner": [10, 12]}


class EmaModule(RecurrentModule, of=Ema):
    """x (rows, n, embed) -> like x."""

    part: Ema
    v: Linear
    gate: Linear
    o: Linear
    decay: Tensor

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        v = ctx.tap(self, "v", self.v(x, ctx)).to(at_least_fp32(x.dtype))
        a = torch.sigmoid(self.decay.to(v.dtype))
        h = v.new_zeros(v.shape[0], v.shape[2]) if carry is None else carry[0]
        states: list[Tensor] = []
        for t in range(v.shape[1]):
            if seq.document is not None:  # a new document starts from zeros
                before = seq.document[:, t - 1] if t else torch.zeros_like(seq.document[:, 0])
                h = torch.where((seq.document[:, t] == before)[:, None], h, torch.zeros_like(h))
            new = a * h + (1 - a) * v[:, t]
            h = new if seq.real is None else torch.where(seq.real[:, t, None], new, h)  # padding leaves the state as it was
            states.append(h)
        averages = ctx.tap(self, "h", torch.stack(states, 1).to(x.dtype))
        return ctx.tap(self, "out", self.o(averages * F.silu(self.gate(x, ctx)), ctx)), (h,)


@oracle("ema")
def ema() -> Iterator[Comparison]:
    """Decay 1/2 in one channel: tokens 2, 4, 8 give averages 1, 2.5, 5.25; silu(x) is x σ(x)."""
    weights = {"v.weight": [[1.0]], "gate.weight": [[1.0]], "decay": [0.0], "o.weight": [[1.0]]}
    module = alone(part("ema", inner=1), weights, embed=1)
    x = torch.tensor([[[2.0], [4.0], [8.0]]], dtype=torch.float64)
    yield Comparison("three tokens", module(x, ctx(3))[0, :, 0], [1.7615942, 9.8201379, 41.9859161])
