"""Linear attention: similarities φ(q)·φ(k) in place of softmax, so that the past fits into one matrix-valued state per head.

    S_t = S_{t−1} + φ(k_t) v_tᵀ          z_t = z_{t−1} + φ(k_t)          y_t = S_tᵀ φ(q_t) / (z_t·φ(q_t))          out = y W_o

The normalizer z is carried as one more column of S, whose value is always 1.

Shapes: x (rows, n, embed)   q, k, v, y (rows, n, heads, head)   φ (rows, n, heads, features)
        S with z (rows, heads, features, head + 1).
Katharopoulos et al. 2020; Choromanski et al. 2021 (Performer).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Feature, FeatureModule
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.decay import decay_flops, decay_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


@register("linear_attention")
class LinearAttention(Recurrent):
    """Linear attention: products of feature maps in place of softmax, in time linear in n."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos head channel",
        "v": "pos head channel",
        "y": "pos head channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    head: int | None = bounded(None, above=0)  # None: width / heads
    feature: Feature = child("elu_features")
    bias: bool = False

    tp_region = True
    values = "v"

    def axes(self, scope: Scope) -> Scope:
        head = self.head or scope.size("embed") // max(self.heads, 1)
        return scope.add(heads=self.heads, head=head, features=self.feature.count(head), columns=head + 1)

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner = ("embed",), ("heads", "head")
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=embed) for name in "qkv"),
            Weight(name="o.weight", out=embed, inp=inner),
            *(Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in "qkv" if self.bias),
            *([Weight(name="o.bias", out=embed, init="zeros", role="bias", tp="once")] if self.bias else []),
        ]

    def state(self, scope: Scope) -> list[State]:
        state = State(name="state", axes=("heads", "features", "columns"), per="sequence", at_least_fp32=True)
        return [state] if scope.decodes else []

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = decay_flops(n, scope.size("heads"), scope.size("features"), scope.size("columns"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        if self.head is None and scope.size("embed") % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the width, {scope.size('embed')}", "or set `head`")]
        return []


class LinearAttentionProof(Proof, of=LinearAttention):
    """Sampled values and what fields act on."""

    acts_on = {"feature": ("q", "k")}
    samples = {"heads": [4, 2], "head": [None, 6], "bias": [False, True]}


class LinearAttentionModule(RecurrentModule, of=LinearAttention):
    """x (rows, n, embed) -> like x."""

    part: LinearAttention
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    feature: FeatureModule

    def setup(self) -> None:
        self.head = self.scope.size("head")

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        q, k, v = self.project("q", x, ctx), self.project("k", x, ctx), self.project("v", x, ctx)
        dtype = at_least_fp32(x.dtype)  # a sum over all tokens, and a quotient of two such sums
        q, k = self.feature.query(q.to(dtype)), self.feature.key(k.to(dtype))
        v, log_decay = F.pad(v.to(dtype), (0, 1), value=1.0), q.new_zeros(q.shape[:3])  # no decay
        y, state = decay_scan(q, k, v, log_decay, seq, None if carry is None else carry[0])
        y, total = y[..., :-1], y[..., -1:]
        y = (y / torch.where(total > 0, total, 1.0)).to(x.dtype)  # padding before the first token has a total of 0
        return ctx.tap(self, "out", self.o(ctx.tap(self, "y", y).flatten(-2), ctx)), (state,)

    def project(self, name: str, x: Tensor, ctx: Ctx) -> Tensor:
        """(rows, n, heads, head)."""
        return ctx.tap(self, name, getattr(self, name)(x, ctx).unflatten(-1, (-1, self.head)))
