"""Initial weights: the standard deviation of the normal distribution each matrix is sampled from.

normal   spread, and with `residual` spread/√(2·depth) for matrices that write to the residual stream (GPT-2)
fan_in   gain/√(inputs)                                                   (T5's rule; LeCun 1998)
mup      µP (Yang et al. 2022): spread for tables, spread·√(base_width/inputs) for matrices, spread·base_width/inputs for
         readouts (logits, scores of experts); AdamW's learning rate of every matrix times base_width/inputs; the logits of a
         head that is tied to the embedding times base_width/width, which is the head's field `scale`
"""

from __future__ import annotations

from math import sqrt

from dovetail.nn.groups import Init
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

LARGEST_SPREAD = 10.0  # far above any in use; products of the matrices of one branch stay in float32


def writes_stream(weight: Weight, scope: Scope) -> bool:
    """Whether the matrix ends a branch: its output is added to the residual stream of a stack of layers."""
    return weight.role == "linear" and bool(weight.inp) and scope.names(weight.out) == ("embed",) and bool(scope.stack)


@register("normal")
class Normal(Init):
    """One spread for all, smaller with depth for matrices that write to the residual stream."""

    spread: float = bounded(0.02, at_least=0, at_most=LARGEST_SPREAD)
    residual: bool = True

    def std(self, weight: Weight, scope: Scope) -> float:
        deep = self.residual and writes_stream(weight, scope)
        return self.spread / sqrt(2 * scope.depth) if deep else self.spread


class NormalProof(Proof, of=Normal):
    """Sampled values."""

    samples = {"spread": [0.02, 0.05], "residual": [True, False]}


@register("fan_in")
class FanIn(Init):
    """The spread that keeps a matmul's output variance equal to its input's."""

    gain: float = bounded(1.0, at_least=0, at_most=LARGEST_SPREAD)

    def std(self, weight: Weight, scope: Scope) -> float:
        if weight.role == "embed" or not weight.inp:
            return self.gain
        return self.gain / sqrt(scope.size(*weight.inp))


class FanInProof(Proof, of=FanIn):
    """Sampled values."""

    samples = {"gain": [1.0, 0.5]}


@register("mup")
class Mup(Init):
    """µP: updates of activations do not grow with the width, and the best learning rate stays about where it is.

    At `base_width` it is the standard parametrization. Heads keep their size, and become more, as the model is made wider. A
    head that is tied to the embedding has `scale: base_width/width`, which `widened` sets.
    """

    spread: float = bounded(0.02, at_least=0, at_most=LARGEST_SPREAD)
    base_width: int = bounded(256, above=0, at_most=2**20)

    def std(self, weight: Weight, scope: Scope) -> float:
        if weight.role == "embed" or not weight.inp:
            return self.spread
        ratio = self.base_width / scope.size(*weight.inp)
        return self.spread * (ratio if weight.readout else sqrt(ratio))

    def lr_scale(self, weight: Weight, scope: Scope) -> float:
        return self.base_width / scope.size(*weight.inp) if weight.matmul else 1.0

    def tied_scale(self, width: int) -> float | None:
        return self.base_width / width


class MupProof(Proof, of=Mup):
    """Sampled values."""

    samples = {"spread": [0.02, 0.05], "base_width": [256, 64]}
