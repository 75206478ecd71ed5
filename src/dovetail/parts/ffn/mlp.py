"""Feed-forward network: two matrices with an activation between.

    out = act(x W_up + b) W_down + b          `hidden` defaults to 4·width          Shapes: x, out (…, embed)

Vaswani et al. 2017.
"""

from __future__ import annotations

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.field import bounded
from dovetail.core.group import Act, Ffn
from dovetail.core.linear import Linear
from dovetail.core.module import Module
from dovetail.core.part import Mistake, Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight


@register("mlp")
class Mlp(Ffn):
    """Feed-forward network of two matrices."""

    TAPS = {"hidden": "pos channel", "out": "pos channel"}
    MISTAKES = {"act": Mistake("activation"), "bias": Mistake("bias missing")}

    hidden: int | None = bounded(None, above=0, widens=True)  # None: 4·width
    act: Act = child("gelu")
    bias: bool = True
    dropout: float = bounded(0.0, at_least=0, below=1)

    tp_region = True
    SAMPLES = {"hidden": [44, 36], "bias": [True, False], "dropout": [0.0, 0.2]}

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


class MlpModule(Module, of=Mlp):
    """x (…, embed) -> like x."""

    part: Mlp
    up: Linear
    down: Linear

    def setup(self) -> None:
        self.act = self.part.act.function

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        hidden = ctx.dropout(ctx.tap(self, "hidden", self.act(self.up(x))), self.part.dropout, self, axes=("ffn",))
        return ctx.tap(self, "out", self.down(hidden))
