"""Gated DeltaNet: linear attention whose recurrent state decays and is corrected by the delta rule.

    q, k, v = conv(x W_q), conv(x W_k), conv(x W_v)      conv: short, causal, depthwise, then silu; q and k then normalized to 1
    β = σ(x W_b)          a = e^{−A softplus(x W_a + b)}          S_t = a_t (1 − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ
    y_t = S_tᵀ q_t / √key                                out = (norm(y) ∘ silu(x W_z)) W_o

A is positive, one per head, stored as log A. Value heads share q and k in groups, as in GQA. The norm is per head.

Shapes: x (rows, n, embed)   q, k (rows, n, key_heads, key)   v, z, y (rows, n, heads, value)   β, a (rows, n, heads)
        S (rows, heads, key, value).
Yang et al. 2025; three of four layers of Qwen3-Next.
"""

from __future__ import annotations

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
from dovetail.ops.scan.delta import delta_flops, delta_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, child, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

LARGEST_A = 16.0  # A is initialized from 1 to this
EPS = 1e-6  # added to a squared norm


@register("gated_deltanet")
class GatedDeltaNet(Recurrent):
    """Gated DeltaNet: linear attention with decay and the delta rule."""

    TAPS = {
        "q": "pos kv_head channel",
        "k": "pos kv_head channel",
        "v": "pos head channel",
        "beta": "pos head",
        "decay": "pos head",
        "y": "pos head channel",
        "gate": "pos channel",
        "out": "pos channel",
    }

    heads: int = bounded(8, above=0, widens=True)
    key_heads: int | None = bounded(None, above=0, widens=True)  # None: as many as heads
    key_size: int | None = bounded(None, above=0)  # None: width / heads
    value_size: int | None = bounded(None, above=0)  # None: width / heads
    conv_size: int = bounded(4, at_least=2, remedy="a kernel of 1 mixes no tokens")  # tokens under the convolution
    norm: Norm = child("rmsnorm")

    tp_region = True
    values = "v"

    def groups(self) -> int:
        """The number of query and key heads."""
        return self.key_heads or self.heads

    def axes(self, scope: Scope) -> Scope:
        each = scope.size("embed") // max(self.heads, 1)
        sizes = {
            "heads": self.heads,
            "key_heads": self.groups(),
            "key": self.key_size or each,
            "value": self.value_size or each,
        }
        return scope.add(**sizes, taps=self.conv_size, conv_state=self.conv_size - 1)

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="value")

    def weights(self, scope: Scope) -> list[Weight]:
        embed, keys, values = ("embed",), ("key_heads", "key"), ("heads", "value")
        projections = {"q": keys, "k": keys, "v": values, "z": values, "b": ("heads",), "a": ("heads",)}
        return [
            *(Weight(name=f"{name}.weight", out=out, inp=embed) for name, out in projections.items()),
            *(Weight(name=f"conv_{name}", out=projections[name], inp=("taps",), role="conv") for name in "qkv"),
            Weight(name="fade_bias", out=("heads",), init="ones", role="bias"),
            Weight(name="a_log", out=("heads",), init="const", role="gate"),
            Weight(name="o.weight", out=embed, inp=values),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.linspace(1.0, LARGEST_A, scope.size("heads"), dtype=torch.float64).log()

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        convolved = [("q", ("key_heads", "key")), ("k", ("key_heads", "key")), ("v", ("heads", "value"))]
        conv_states = [conv_state(f"conv_{name}", *channels) for name, channels in convolved]
        return [*conv_states, State(name="state", axes=("heads", "key", "value"), per="sequence", at_least_fp32=True)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = delta_flops(n, scope.size("heads"), scope.size("key"), scope.size("value"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        if self.heads % self.groups():
            what = f"{self.groups()} does not divide {self.heads} heads"
            return [Problem("key_heads", what, "make heads a multiple of key_heads")]
        if None in (self.key_size, self.value_size) and scope.size("embed") % self.heads:
            what = f"{self.heads} does not divide the width, {scope.size('embed')}"
            return [Problem("heads", what, "or set `key_size` and `value_size`")]
        return []


class GatedDeltaNetProof(Proof, of=GatedDeltaNet):
    """Sampled values."""

    samples = {
        "heads": [4, 14],
        "key_heads": [2, None, 1],
        "key_size": [5, None],
        "value_size": [6, None],
        "conv_size": [4, 3],
    }


class GatedDeltaNetModule(RecurrentModule, of=GatedDeltaNet):
    """x (rows, n, embed) -> like x."""

    part: GatedDeltaNet
    q: Linear
    k: Linear
    v: Linear
    z: Linear
    b: Linear
    a: Linear
    o: Linear
    norm: Module
    fade_bias: Tensor
    a_log: Tensor

    def setup(self) -> None:
        self.key, self.value = self.scope.size("key"), self.scope.size("value")
        self.scale = self.key**-0.5

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        dtype, (conv_q, conv_k, conv_v, state) = at_least_fp32(x.dtype), carry or (None,) * 4
        q, conv_q = self.convolved("q", x, self.key, seq, ctx, conv_q)
        k, conv_k = self.convolved("k", x, self.key, seq, ctx, conv_k)
        v, conv_v = self.convolved("v", x, self.value, seq, ctx, conv_v)
        q, k = _unit(q.to(dtype)) * self.scale, _unit(k.to(dtype))
        shared = v.shape[2] // k.shape[2]  # value heads per query and key head
        if shared > 1:
            q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
        beta = ctx.tap(self, "beta", self.b(x, ctx).to(dtype).sigmoid())
        # log a, at most 0
        log_decay = ctx.tap(self, "decay", -self.a_log.to(dtype).exp() * F.softplus(self.a(x, ctx).to(dtype) + self.fade_bias))
        y, state = delta_scan(q, k, v, log_decay, beta, seq, state)
        y = self.norm(ctx.tap(self, "y", y.to(x.dtype)), ctx).flatten(-2) * F.silu(ctx.tap(self, "gate", self.z(x, ctx)))
        return ctx.tap(self, "out", self.o(y, ctx)), (conv_q, conv_k, conv_v, state)

    def convolved(
        self, name: str, x: Tensor, size: int, seq: SequenceRows, ctx: Ctx, conv_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x projected and convolved (rows, n, count, size), and the new conv state (rows, count, size, taps − 1)."""
        x, weight = getattr(self, name)(x, ctx), getattr(self, f"conv_{name}")
        y, conv_state = causal_conv(x, weight, None, seq, None if conv_state is None else conv_state.flatten(1, 2))
        return ctx.tap(self, name, F.silu(y).unflatten(-1, (-1, size))), conv_state.unflatten(1, (-1, size))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
