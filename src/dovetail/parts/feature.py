"""Feature maps of linear attention: φ(q)·φ(k) ≥ 0 takes the place of e^{q·k}.

    elu_features       elu(x) + 1                                                       Katharopoulos et al. 2020
    relu_features      max(x, 0) + floor                                                Choromanski et al. 2021
    random_features    e^{ωᵢ·x − |x|²/2} / √m for directions ω₁ … ω_m, x scaled by head^{−1/4}; the mean over directions of
                       φ(q)·φ(k) is e^{q·k/√head}, as in softmax                        Choromanski et al. 2021 (Performer)

The directions are a constant of the spec. Each is normally distributed, and every `head` of them are orthogonal, which lowers
the variance. The features of all keys, and those of any one query, are multiplied by a factor that the normalizer cancels; it
keeps them from overflowing. The exponent of a key is at least −60, so that a key of large norm does not underflow.

Shapes: x (…, head)   φ(x) (…, features)   directions (features, head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.groups import Feature, FeatureModule
from dovetail.nn.module import at_least_fp32
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("elu_features")
class EluFeatures(Feature):
    """elu(x) + 1: smooth, and never 0."""


class EluFeaturesModule(FeatureModule, of=EluFeatures):
    """elu(x) + 1."""

    def key(self, k: Tensor) -> Tensor:
        return F.elu(k) + 1.0


@register("relu_features")
class ReluFeatures(Feature):
    """max(x, 0) + floor, so that every token has a weight above 0."""

    floor: float = bounded(1e-3, above=0, remedy="at 0 all weights of a query could be 0")


class ReluFeaturesProof(Proof, of=ReluFeatures):
    """Sampled values."""

    samples = {"floor": [1e-3, 0.2]}


class ReluFeaturesModule(FeatureModule, of=ReluFeatures):
    """max(x, 0) + floor."""

    part: ReluFeatures

    def key(self, k: Tensor) -> Tensor:
        return F.relu(k) + self.part.floor


@register("random_features")
class RandomFeatures(Feature):
    """Positive random features (Performer): their products approximate softmax."""

    features: int | None = bounded(None, above=0)  # None: twice the head
    draw: int = bounded(0, at_least=0)  # seed of the directions

    def count(self, head: int) -> int:
        return self.features or 2 * head

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="directions", out=("features",), inp=("head",), role="const")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        count, head = scope.size("features"), scope.size("head")
        generator = torch.Generator().manual_seed(self.draw)
        q, r = torch.linalg.qr(torch.randn(-(-count // head), head, head, generator=generator, dtype=torch.float64))
        # with a positive diagonal of R, Q is uniform over all rotations, and the same in every LAPACK
        rotated = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.flatten(0, 1)[:count]
        return rotated * torch.randn(count, head, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        flops = 4 * n * scope.size("heads", "head") * scope.size("features")  # queries and keys, each with every direction
        return flops, flops

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if scope.size("features") >= scope.size("head"):
            return []
        what = f"{scope.size('features')} directions do not span a head of {scope.size('head')}"
        return [Problem("features", what, "use at least as many as the head is wide")]


class RandomFeaturesProof(Proof, of=RandomFeatures):
    """Sampled values."""

    samples = {"features": [None, 11], "draw": [0, 3]}


# of the exponent of a key: without it all features of a key of norm 20 underflow in float32, and tokens that see only such keys
# divide 0 by 0
FLOOR = -60.0


class RandomFeaturesModule(FeatureModule, of=RandomFeatures):
    """e^{ω·x − |x|²/2} / √m, in float32 at least."""

    directions: Tensor

    def setup(self) -> None:
        self.scale, self.amplitude = self.scope.size("head") ** -0.25, self.scope.size("features") ** -0.5

    def query(self, q: Tensor) -> Tensor:
        exponent = self.exponent(q)
        # the largest feature of each query becomes 1/√m, so that none overflows
        return ((exponent - exponent.amax(-1, keepdim=True)).exp() * self.amplitude).to(q.dtype)

    def key(self, k: Tensor) -> Tensor:
        # an exponent is at most |ω|²/2, where k = ω, and 0 where k is: half of that is the middle
        middle = self.directions.square().sum(-1).amax() / 4
        return ((self.exponent(k) - middle).clamp_min(FLOOR).exp() * self.amplitude).to(k.dtype)

    def exponent(self, x: Tensor) -> Tensor:
        """ω·x − |x|²/2 of the scaled x: (…, features)."""
        x = x.to(at_least_fp32(x.dtype)) * self.scale
        return x @ self.directions.T - x.square().sum(-1, keepdim=True) / 2
