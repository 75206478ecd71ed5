"""(IA)³: learned factors of activations.

    y = l ⊙ (x Wᵀ + b)        l (out,) for keys and values
    y = (l ⊙ x) Wᵀ + b        l (inp,) for the matrix behind the hidden layer of an ffn

All factors are one at first. By default they scale keys, values and the hidden activations of the ffn, as in the paper: the
matrices that produce the axis kv_heads, and those that reduce over the axis ffn.                        Liu et al. 2022
"""

from __future__ import annotations

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, Rows
from dovetail.spec.fold import Declared
from dovetail.spec.part import register
from dovetail.spec.weight import KV_HEADS, Weight
from dovetail.weights.adapters.kind import AdapterKind, AdapterModule

HIDDEN = "ffn"  # the axis of the hidden activations of an ffn


@register("ia3")
class Ia3(AdapterKind):
    """(IA)³: learned factors of keys, values and hidden activations."""

    def adapter(self) -> type[AdapterModule]:
        return Ia3Module

    def means(self, role: str, d: Declared) -> bool:
        scaled = d.scope.names(d.weight.out)[:1] == (KV_HEADS,) or self.scales_inputs(d)
        return super().means(role, d) and scaled

    @staticmethod
    def scales_inputs(base: Declared) -> bool:
        """Whether the inputs are scaled: hidden activations."""
        return base.scope.names(base.weight.inp)[:1] == (HIDDEN,)

    def tensors(self, base: Declared) -> list[Weight]:
        w = base.weight
        inp, out = (w.inp, ()) if self.scales_inputs(base) else ((), w.out)
        return [Weight(name="l", batch=w.batch, out=out, inp=inp, init="ones", role="gate", tp=w.tp, used=w.used)]


class Ia3Module(AdapterModule):
    """l (…, out) or (…, inp)."""

    l: Tensor  # noqa: E741  the letter of the paper

    def setup(self) -> None:
        self.inputs = bool(self.declared[0].weight.inp)

    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        factors, multiply = self.l.to(x.dtype), leaf.storage.multiply
        return multiply(leaf, x * factors, ctx) if self.inputs else multiply(leaf, x, ctx) * factors

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        factors, multiply = self.l.to(x.dtype).index_select(0, rows.expert), leaf.storage.grouped
        return multiply(leaf, x * factors, rows, ctx) if self.inputs else multiply(leaf, x, rows, ctx) * factors

    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        dense = leaf.dense()
        factors = self.l.to(dense.dtype)
        return dense * (factors[..., None, :] if self.inputs else factors[..., None])

    def merged_bias(self, leaf: Linear) -> Tensor | None:
        bias = leaf.bias
        return bias if bias is None or self.inputs else bias * self.l.to(bias.dtype)
