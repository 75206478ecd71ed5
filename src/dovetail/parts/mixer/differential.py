"""Differential attention: the difference of two softmaxes, which cancels what both attend to.

    q₁, q₂, k₁, k₂ = x W_q, x W_k in halves          v = x W_v, as wide as both
    z = (softmax(q₁ k₁ᵀ/√d) − λ softmax(q₂ k₂ᵀ/√d)) v          out = ((1 − λ₀) · z / rms z) W_o, each head normalized by itself
    λ = e^{⟨a₁, b₁⟩} − e^{⟨a₂, b₂⟩} + λ₀          λ₀ = 0.8 − 0.6 e^{−0.3 l} in layer l = 0, 1, …

a and b (head,) are learned, one set per layer. Query heads share KV heads as in grouped-query attention.

Shapes: x (…, n, embed)   q (…, n, heads, 2, head)   k, v (…, m, kv_heads, 2, head)   z (…, n, heads, 2·head).    Ye et al. 2024

The tap `halves` (…, n, heads, 2, 2·head) is of both products with v, before their difference.
"""

from __future__ import annotations

from math import exp
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask, Position
from dovetail.nn.linear import Linear, multiply_fused
from dovetail.nn.module import at_least_fp32
from dovetail.nn.softmax import SoftmaxMixer, SoftmaxMixerProof, SoftmaxModule, check_heads, check_position
from dovetail.nn.view import KV, KVView, OnRead
from dovetail.ops.attend import WHOLE, StoredEntries
from dovetail.ops.mask import pairs
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, child, register
from dovetail.spec.part_proof import FieldCause
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

LAMBDAS = ("a1", "b1", "a2", "b2")


@register("differential_attention")
class DifferentialAttention(SoftmaxMixer):
    """The difference of two softmaxes per head, with a learned factor λ."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos kv_head channel",
        "v": "pos kv_head channel",
        "halves": "pos head half channel",
        "z": "pos head channel",
        "out": "pos channel",
    }

    heads: int = bounded(4, above=0, widens=True)
    kv_heads: int | None = bounded(None, above=0, widens=True)  # None: as many as heads
    head: int | None = bounded(None, above=0)  # of each half; None: width / (2 · heads)
    mask: Mask = child("causal")
    position: Position = child("rope")
    eps: float = bounded(1e-5, above=0)

    def groups(self) -> int:
        """The number of KV heads."""
        return self.kv_heads or self.heads

    def axes(self, scope: Scope) -> Scope:
        head = self.head or scope.size("embed") // (2 * max(self.heads, 1))
        return scope.add(heads=self.heads, kv_heads=self.groups(), head=head, halves=2)

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return self.position_scope(scope)

    def children(self) -> dict[str, Part]:
        return {"position": self.position}

    def weights(self, scope: Scope) -> list[Weight]:
        q, kv = ("heads", "halves", "head"), ("kv_heads", "halves", "head")
        return [
            *(Weight(name=f"{name}.weight", out=out, inp=("embed",)) for name, out in (("q", q), ("k", kv), ("v", kv))),
            Weight(name="o.weight", out=("embed",), inp=q),
            *(Weight(name=name, out=("head",), init="const", role="gate", tp="replicate") for name in LAMBDAS),
            self.head_number(),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        if name not in LAMBDAS:
            return super().constant(name, scope)
        # normal with a standard deviation of 0.1, whatever the init of the model: an exponent must not be large
        generator = torch.Generator().manual_seed(crc32(f"{scope.path}.{name}".encode()))
        return 0.1 * torch.randn(scope.size("head"), dtype=torch.float64, generator=generator)

    def state(self, scope: Scope) -> list[State]:
        return self.cached(scope, State(name="kv", axes=("kv_heads", "halves", "head"), copies=2))

    def needs(self) -> frozenset[str]:
        return self.position.needs()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 6 * scope.size("heads", "halves", "head")  # scores of both halves, each with values of twice their width
        return each * n * n, each * pairs(self.mask, n)

    def check(self, scope: Scope) -> list[Problem]:
        head = None if self.head is None else 2 * self.head
        if wrong := check_heads(self.heads, self.groups(), head, scope) or check_position(self.position):
            return wrong
        if self.head is None and scope.size("embed") % (2 * self.heads):
            what = f"twice {self.heads} does not divide the width, {scope.size('embed')}"
            return [Problem("heads", what, "change heads, or set `head`, the size of one half")]
        return self.check_mask(scope)


class DifferentialAttentionProof(SoftmaxMixerProof, of=DifferentialAttention):
    """Sampled values and causes."""

    causes = {
        "mask": FieldCause("mask"),
        "position": FieldCause("position missing"),
        "eps": FieldCause("norm's eps", (1e-5, 1e-6)),
    }
    samples = {"heads": [6, 4], "kv_heads": [2, None, 1], "head": [12, 8], "eps": [1e-5, 0.1]}


class DifferentialAttentionModule(SoftmaxModule, of=DifferentialAttention):
    """x (…, n, embed) -> like x."""

    part: DifferentialAttention
    q: Linear
    k: Linear
    v: Linear
    fused = ("q", "k", "v")
    a1: Tensor
    b1: Tensor
    a2: Tensor
    b2: Tensor

    def setup(self) -> None:
        super().setup()
        self.size = self.scope.size("head")
        self.scale = self.size**-0.5
        self.start = 0.8 - 0.6 * exp(-0.3 * self.scope.layer)  # λ₀

    def on_read(self, ctx: Ctx) -> OnRead | None:
        return self.position.on_read if self.part.position.rotates_on_read() else None

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        layout = ctx.layout
        q, k, v = (y.unflatten(-1, (-1, self.size)) for y in multiply_fused(x, ctx, self.fused_weight, self.q, self.k, self.v))
        q, k = self.position.rotate(q, layout), self.position.on_write(k, layout)
        q, k, v = ctx.tap(self, "q", q), ctx.tap(self, "k", k), ctx.tap(self, "v", v)
        q, k, v = (y.unflatten(-2, (-1, 2)) for y in (q, k, v))
        kv, scoring = view.append(layout, k, v), self.scoring(ctx)
        both = torch.stack([half(kv, i).attend(layout, q[..., i, :], scoring) for i in range(2)], -2)
        wide = at_least_fp32(x.dtype)  # what is left of two values that are nearly equal is not rounded again
        first, second = ctx.tap(self, "halves", both).to(wide).unbind(-2)
        z = F.rms_norm(first - self.factor() * second, (2 * self.size,), None, self.part.eps)
        return self.project_out(((1.0 - self.start) * z).to(x.dtype), ctx)

    def factor(self) -> Tensor:
        """λ."""
        a1, b1, a2, b2 = (x.to(at_least_fp32(x.dtype)) for x in (self.a1, self.b1, self.a2, self.b2))
        return (a1 @ b1).exp() - (a2 @ b2).exp() + self.start


def half(kv: KV, i: int) -> StoredEntries:
    """The keys (…, m, kv_heads, head) of one half, and the values (…, m, kv_heads, 2·head)."""
    (k, v), layout = kv.entries()
    return StoredEntries(layout, (k[..., i, :], v.flatten(-2)))
