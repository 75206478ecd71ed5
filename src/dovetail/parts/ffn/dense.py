"""Dense feed-forward networks: gated (GLU, SwiGLU, GeGLU), and plain.

    out = (act(x W_gate) ∘ x W_up) W_down         `hidden` defaults to 8·width/3, rounded up to a multiple of 256

act: silu is SwiGLU, gelu GeGLU, sigmoid GLU, identity bilinear.      Shapes: x, out (…, embed)
`gate_multiplier` is a fixed factor of x W_gate, inside the activation (Falcon-H1).
Dauphin et al. 2016; Shazeer 2020; Zuo et al. 2025 (Falcon-H1).

Plain: two matrices with an activation between.

    out = act(x W_up + b) W_down + b          `hidden` defaults to 4·width          Shapes: x, out (…, embed)

Vaswani et al. 2017.
"""

from __future__ import annotations

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act, Ffn
from dovetail.nn.linear import Linear, multiply_fused
from dovetail.nn.module import Module
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Problem, child, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


def usual_hidden(width: int) -> int:
    """8·width/3 rounded up to a multiple of 256: as many weights as a plain ffn of 4·width."""
    return -(-8 * width // (3 * 256)) * 256


@register("glu")
class Glu(Ffn):
    """Gated feed-forward: SwiGLU with silu, GeGLU with gelu."""

    TAPS = {"hidden": "pos channel", "out": "pos channel"}

    hidden: int | None = bounded(None, above=0, widens=True)  # None: 8·width/3, rounded up to a multiple of 256
    act: Act = child("silu")
    bias: bool = False
    gate_multiplier: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    dropout: float = bounded(0.0, at_least=0, below=1)

    tp_region = True

    def axes(self, scope: Scope) -> Scope:
        return scope.add(ffn=usual_hidden(scope.size("embed")) if self.hidden is None else self.hidden)

    def weights(self, scope: Scope) -> list[Weight]:
        inner, outer = ("ffn",), ("embed",)
        return [
            *(Weight(name=f"{name}.weight", out=inner, inp=outer) for name in ("gate", "up")),
            Weight(name="down.weight", out=outer, inp=inner),
            *(Weight(name=f"{name}.bias", out=inner, init="zeros", role="bias") for name in ("gate", "up") if self.bias),
            *([Weight(name="down.bias", out=outer, init="zeros", role="bias", tp="once")] if self.bias else []),
        ]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        hidden, usual = scope.size("ffn"), 8 * scope.size("embed") / 3
        if 0.8 * usual <= hidden <= 1.6 * usual + 256:  # rounding, and models with a wider ffn
            return []
        return [Problem("hidden", f"{hidden} is far from the usual 8·width/3 ≈ {usual:.0f} of a gated ffn")]


class GluProof(Proof, of=Glu):
    """Sampled values and causes."""

    causes = {"act": FieldCause("activation"), "bias": FieldCause("bias missing")}
    samples = {"hidden": [44, 36], "bias": [False, True], "gate_multiplier": [1.0, 0.7], "dropout": [0.0, 0.2]}


class GluModule(Module, of=Glu):
    """x (…, embed) -> like x."""

    part: Glu
    gate: Linear
    up: Linear
    down: Linear

    fused = ("gate", "up")

    def setup(self) -> None:
        self.act, self.factor = self.part.act.function, self.part.gate_multiplier

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        gate, up = multiply_fused(x, ctx, self.fused_weight, self.gate, self.up)
        hidden = self.act(gate if self.factor == 1.0 else gate * self.factor) * up
        if ctx.taps is None and ctx.draws is None:
            return self.down(hidden, ctx)
        hidden = ctx.tap(self, "hidden", hidden)
        if ctx.draws is not None:
            hidden = ctx.draws.dropout(ctx, hidden, self.part.dropout, self, axes=("ffn",))
        return ctx.tap(self, "out", self.down(hidden, ctx))


@register("mlp")
class Mlp(Ffn):
    """Feed-forward network of two matrices."""

    TAPS = {"hidden": "pos channel", "out": "pos channel"}

    hidden: int | None = bounded(None, above=0, widens=True)  # None: 4·width
    act: Act = child("gelu")
    bias: bool = True
    dropout: float = bounded(0.0, at_least=0, below=1)

    tp_region = True

    def axes(self, scope: Scope) -> Scope:
        return scope.add(ffn=4 * scope.size("embed") if self.hidden is None else self.hidden)

    def weights(self, scope: Scope) -> list[Weight]:
        return [
            Weight(name="up.weight", out=("ffn",), inp=("embed",)),
            *([Weight(name="up.bias", out=("ffn",), init="zeros", role="bias")] if self.bias else []),
            Weight(name="down.weight", out=("embed",), inp=("ffn",)),
            *([Weight(name="down.bias", out=("embed",), init="zeros", role="bias", tp="once")] if self.bias else []),
        ]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        hidden, usual = scope.size("ffn"), 4 * scope.size("embed")
        return [] if hidden == usual else [Problem("hidden", f"{hidden} is not the usual 4·width = {usual} of a plain ffn")]


class MlpProof(Proof, of=Mlp):
    """Sampled values and causes."""

    causes = {"act": FieldCause("activation"), "bias": FieldCause("bias missing")}
    samples = {"hidden": [44, 36], "bias": [True, False], "dropout": [0.0, 0.2]}


class MlpModule(Module, of=Mlp):
    """x (…, embed) -> like x."""

    part: Mlp
    up: Linear
    down: Linear

    def setup(self) -> None:
        self.act = self.part.act.function

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        hidden = ctx.tap(self, "hidden", self.act(self.up(x, ctx)))
        if ctx.draws is not None:
            hidden = ctx.draws.dropout(ctx, hidden, self.part.dropout, self, axes=("ffn",))
        return ctx.tap(self, "out", self.down(hidden, ctx))
