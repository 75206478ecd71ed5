"""What attention takes from an earlier layer.

    shared_kv           k, v = k_l, v_l             the keys and values of layer l; none are computed or cached here
    value_residual      v ← λ₀·v + λ₁·v_l           λ learned, one pair a layer; both begin at ½

Shapes: k, v (…, n, kv_heads, head), after their norm and rotation. Sun et al. 2024 (YOCO), Brandon et al. 2024 (cross-layer
attention), Gemma 3n: shared keys and values; Zhou et al. 2024 (ResFormer): value residual.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dovetail.nn.cross_layer import Values
from dovetail.nn.groups import Earlier, EarlierModule
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("shared_kv")
class SharedKV(Earlier):
    """The keys and values, and the KV cache, of an earlier layer (Gemma 3n)."""

    names: ClassVar[tuple[str, ...]] = ("k", "v")
    projects: ClassVar[bool] = False

    layer: int = bounded(0, at_least=0)


class SharedKVModule(EarlierModule, of=SharedKV):
    """The values themselves."""

    def forward(self, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        return values["k"], values["v"]


@register("value_residual")
class ValueResidual(Earlier):
    """A learned sum of the values of this layer and of an earlier one (ResFormer)."""

    names: ClassVar[tuple[str, ...]] = ("v",)

    layer: int = bounded(0, at_least=0)

    def axes(self, scope: Scope) -> Scope:
        return scope.add(pair=2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="mix", out=("pair",), init="const", role="gate", tp="replicate")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        return torch.full((2,), 0.5, dtype=torch.float64)


class ValueResidualModule(EarlierModule, of=ValueResidual):
    """v and v_l (…, n, kv_heads, head) -> like v."""

    mix: Tensor

    def forward(self, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        return k, self.mix[0] * v + self.mix[1] * values["v"]
