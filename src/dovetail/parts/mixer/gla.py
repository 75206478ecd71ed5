"""Gated linear attention (GLA): a matrix-valued recurrent state per head, with a data-dependent decay per key channel.

    q, k, v = x W_q, x W_k, x W_v          a = σ(x W_d W_u + b)^{1/τ}          S_t = diag(a_t) S_{t−1} + k_t v_tᵀ
    y_t = S_tᵀ q_t / √key                  out = (norm(y) ∘ silu(x W_g)) W_o

W_d W_u is of low rank. The exponent 1/τ keeps a close to 1, so the state decays slowly. The norm is per head.

Shapes: x (rows, n, embed)   q, k, a (rows, n, heads, key)   v, y (rows, n, heads, value)   S (rows, heads, key, value).
Yang et al. 2024.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Norm
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module, at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.gated import gated_flops, gated_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


@register("gla")
class GLA(Recurrent):
    """Gated linear attention: a data-dependent decay per key channel."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos head channel",
        "v": "pos head channel",
        "decay": "pos head channel",
        "y": "pos head channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    heads: int = bounded(4, above=0, widens=True)
    key_size: int | None = bounded(None, above=0)  # None: width / heads / 2
    value_size: int | None = bounded(None, above=0)  # None: width / heads
    rank: int = bounded(16, above=0)  # of the decay's projection
    gate_normalizer: float = bounded(16.0, above=0, remedy="use 1 for no root")  # τ: the larger, the slower the decay
    norm: Norm = child("rmsnorm")

    tp_region = True
    values = "v"

    def axes(self, scope: Scope) -> Scope:
        each = scope.size("embed") // max(self.heads, 1)
        return scope.add(heads=self.heads, key=self.key_size or each // 2, value=self.value_size or each, rank=self.rank)

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="value")

    def weights(self, scope: Scope) -> list[Weight]:
        embed, keys, values = ("embed",), ("heads", "key"), ("heads", "value")
        projections = {"q": keys, "k": keys, "v": values, "gate": values}
        return [
            *(Weight(name=f"{name}.weight", out=out, inp=embed) for name, out in projections.items()),
            Weight(name="fade_down.weight", out=("rank",), inp=embed, tp="replicate"),  # every head reads all of it
            Weight(name="fade_up.weight", out=keys, inp=("rank",)),
            Weight(name="fade_up.bias", out=keys, init="zeros", role="bias"),
            Weight(name="o.weight", out=embed, inp=values),
        ]

    def state(self, scope: Scope) -> list[State]:
        state = State(name="state", axes=("heads", "key", "value"), per="sequence", at_least_fp32=True)
        return [state] if scope.decodes else []

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = gated_flops(n, scope.size("heads"), scope.size("key"), scope.size("value"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        width, sizes = scope.size("embed"), {"key_size": 2 * self.heads, "value_size": self.heads}
        return [
            Problem("heads", f"{parts} does not divide the width, {width}, for `{name}`", f"set `{name}`")
            for name, parts in sizes.items()
            if getattr(self, name) is None and width % parts
        ]


class GLAProof(Proof, of=GLA):
    """Sampled values."""

    samples = {"heads": [2, 4], "key_size": [5, None], "value_size": [6, None], "rank": [3, 8], "gate_normalizer": [16.0, 1.5]}


class GLAModule(RecurrentModule, of=GLA):
    """x (rows, n, embed) -> like x."""

    part: GLA
    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    fade_down: Linear
    fade_up: Linear
    o: Linear
    norm: Module

    def setup(self) -> None:
        self.key, self.value = self.scope.size("key"), self.scope.size("value")
        self.scale = self.key**-0.5

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        q = ctx.tap(self, "q", self.q(x, ctx).unflatten(-1, (-1, self.key)))
        k = ctx.tap(self, "k", self.k(x, ctx).unflatten(-1, (-1, self.key)))
        v = ctx.tap(self, "v", self.v(x, ctx).unflatten(-1, (-1, self.value)))
        log_decay = self.fade_up(self.fade_down(x, ctx), ctx).to(at_least_fp32(x.dtype)).unflatten(-1, (-1, self.key))
        log_decay = ctx.tap(self, "decay", F.logsigmoid(log_decay) / self.part.gate_normalizer)  # log a, at most 0
        y, state = gated_scan(q.to(log_decay.dtype) * self.scale, k, v, log_decay, seq, None if carry is None else carry[0])
        y = self.norm(ctx.tap(self, "y", y), ctx).flatten(-2) * F.silu(ctx.tap(self, "gate", self.gate(x, ctx)))
        return ctx.tap(self, "out", self.o(y, ctx)), (state,)
