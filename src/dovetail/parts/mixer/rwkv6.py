"""RWKV-6 ("Finch") time mix: a matrix-valued recurrent state per head, with data-dependent decay and token shift.

    x̂ = x_{t−1} − x_t                                    token shift: the difference to the previous token (0 before the first)
    m = tanh((x + x̂ ∘ μ) M)                              five pieces, one for each of r, k, v, w, g
    x_r = x + x̂ ∘ (μ_r + m_r M_r)                        data-dependent interpolation with the previous token; k, v, w, g alike
    r, k, v, g = x_r W_r, x_k W_k, x_v W_v, x_g W_g      a = e^{−e^{λ + tanh(x_w D) D'}}
    S_t = diag(a_t) S_{t−1} + k_t v_tᵀ                   y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t
    out = (norm(y) ∘ silu(g)) W_o                        norm: a LayerNorm per head, with scale and shift per channel

M, M_r … and D, D' are of low rank; u is the bonus of the current token. λ and μ are initialized from slow to fast over the
channels, differently in each layer.

Shapes: x (rows, n, embed)   r, k, v, a, y (rows, n, heads, head)   u (heads, head)   S (rows, heads, head, head).
Peng et al. 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx, replaced
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.nn.recur import Carry, Recurrent, RecurrentModule
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.conv import causal_conv
from dovetail.ops.scan.gated import gated_flops, gated_scan
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight

MIXED = ("r", "k", "v", "w", "g")
SLOWEST, SPAN = -6.0, 5.0  # λ is initialized for a decay of e^{−e^{−6}} = 0.9975 per token to e^{−e^{−1}} = 0.69


@register("rwkv6")
class Rwkv6(Recurrent):
    """RWKV-6 time mix: data-dependent decay and token shift."""

    TAPS = {
        "r": "pos head channel",
        "k": "pos head channel",
        "v": "pos head channel",
        "decay": "pos head channel",
        "y": "pos head channel",
        "scale": "pos head group",  # what the norm of the heads divides by
        "gate": "pos channel",
        "out": "pos channel",
    }

    heads: int = bounded(4, above=0, widens=True)
    head: int | None = bounded(None, above=0)  # None: width / heads
    mix_rank: int = bounded(32, above=0)
    decay_rank: int = bounded(64, above=0)
    eps: float = bounded(64e-5, above=0)

    tp_region = True
    values = "v"

    def axes(self, scope: Scope) -> Scope:
        head = self.head or scope.size("embed") // max(self.heads, 1)
        ranks = {"mix_rank": self.mix_rank, "decay_rank": self.decay_rank}
        return scope.add(heads=self.heads, head=head, mixed=len(MIXED), **ranks)

    def weights(self, scope: Scope) -> list[Weight]:
        embed, inner = ("embed",), ("heads", "head")
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=embed) for name in "rkvg"),
            # every head reads the whole interpolation, so it is replicated across ranks
            Weight(name="mix_down.weight", out=("mixed", "mix_rank"), inp=embed, tp="replicate"),
            *(Weight(name=f"mix_{name}.weight", out=embed, inp=("mix_rank",), tp="replicate") for name in MIXED),
            *(Weight(name=f"mu_{name}", out=embed, init="const", role="gate") for name in ("x", *MIXED)),
            Weight(name="fade_down.weight", out=("decay_rank",), inp=embed, tp="replicate"),
            Weight(name="fade_up.weight", out=inner, inp=("decay_rank",)),
            Weight(name="fade", out=inner, init="const", role="gate"),
            Weight(name="bonus", out=inner, init="ones", role="gate"),
            Weight(name="scale", out=inner, init="ones", role="norm"),
            Weight(name="shift", out=inner, init="zeros", role="bias"),
            Weight(name="o.weight", out=embed, inp=inner),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        count = scope.size("heads", "head") if name == "fade" else scope.size("embed")
        channel = torch.arange(count, dtype=torch.float64)
        if name == "fade":
            depth = scope.layer / max(scope.depth - 1, 1)
            return SLOWEST + SPAN * (channel / max(count - 1, 1)) ** (0.7 + 1.3 * depth)
        return 1.0 - (channel / count) ** (1.0 - scope.layer / scope.depth)

    def state(self, scope: Scope) -> list[State]:
        if not scope.decodes:
            return []
        state = State(name="state", axes=("heads", "head", "head"), per="sequence", at_least_fp32=True)
        return [State(name="last", axes=("embed",), per="sequence"), state]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = gated_flops(n, scope.size("heads"), scope.size("head"), scope.size("head"))
        return flops, flops

    def check(self, scope: Scope) -> list[Problem]:
        if self.head is None and scope.size("embed") % self.heads:
            return [Problem("heads", f"{self.heads} does not divide the width, {scope.size('embed')}", "or set `head`")]
        return []


class Rwkv6Proof(Proof, of=Rwkv6):
    """Sampled values."""

    samples = {"heads": [2, 4], "head": [5, None], "mix_rank": [3, 8], "decay_rank": [6, 9], "eps": [64e-5, 0.1]}


class Rwkv6Module(RecurrentModule, of=Rwkv6):
    """x (rows, n, embed) -> like x."""

    part: Rwkv6
    r: Linear
    k: Linear
    v: Linear
    g: Linear
    o: Linear
    mix_down: Linear
    fade_down: Linear
    fade_up: Linear
    mu_x: Tensor
    fade: Tensor
    bonus: Tensor
    scale: Tensor
    shift: Tensor

    def setup(self) -> None:
        self.head = self.scope.size("head")

    def recur(self, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None) -> tuple[Tensor, Carry]:
        last, state = (None, None) if carry is None else (carry[0][..., None], carry[1])
        only_before = x.new_tensor([1.0, 0.0]).expand(x.shape[-1], 2)
        before, last = causal_conv(x, only_before, None, seq, last)
        back = before - x
        mixes = torch.tanh(self.mix_down(x + back * self.mu_x, ctx)).chunk(len(MIXED), -1)
        r, k, v, w, g = [self.mixed(name, x, back, mix, ctx) for name, mix in zip(MIXED, mixes, strict=True)]
        r = ctx.tap(self, "r", self.r(r, ctx).unflatten(-1, (-1, self.head)))
        k = ctx.tap(self, "k", self.k(k, ctx).unflatten(-1, (-1, self.head)))
        v = ctx.tap(self, "v", self.v(v, ctx).unflatten(-1, (-1, self.head)))
        dtype = at_least_fp32(x.dtype)
        log_decay = self.fade.to(dtype) + self.fade_up(torch.tanh(self.fade_down(w, ctx)), ctx).to(dtype)
        log_decay = ctx.tap(self, "decay", -log_decay.exp().unflatten(-1, (-1, self.head)))  # log a, below 0
        y, state = gated_scan(r, k, v, log_decay, seq, state, self.bonus.unflatten(0, (-1, self.head)))
        y = self.normed(ctx.tap(self, "y", y), ctx).flatten(-2) * self.scale + self.shift
        return ctx.tap(self, "out", self.o(y * F.silu(ctx.tap(self, "gate", self.g(g, ctx))), ctx)), (last[..., 0], state)

    def normed(self, y: Tensor, ctx: Ctx) -> Tensor:
        """y (rows, n, heads, head), each head normalized; the formula is written out only if a listener replaces the scale."""
        out = F.layer_norm(y, (self.head,), eps=self.part.eps)
        if ctx.wants(self, "scale"):
            wide = y.to(at_least_fp32(y.dtype))
            centered = wide - wide.mean(-1, keepdim=True)
            scale = replaced(ctx, self, "scale", torch.sqrt(centered.square().mean(-1, keepdim=True) + self.part.eps))
            out = out if scale is None else (centered / scale).to(y.dtype)
        return out

    def mixed(self, name: str, x: Tensor, back: Tensor, mix: Tensor, ctx: Ctx) -> Tensor:
        """x interpolated with the previous token, for one projection: (rows, n, embed)."""
        return x + back * (getattr(self, f"mu_{name}") + getattr(self, f"mix_{name}")(mix, ctx))
