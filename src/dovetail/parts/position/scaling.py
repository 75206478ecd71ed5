"""RoPE scaling: rotary frequencies f_i = base^(−i/pairs) changed for contexts longer than those of training.

linear_scaling  f / factor                                                       Chen et al. 2023 (interpolation)
ntk             base ← base · factor^(d/(d−2))                                   bloc97 2023 (NTK-aware)
dynamic_ntk     ntk with factor·n/original − (factor − 1), n the current length  emozilla 2023
yarn            high frequencies unchanged, low ones / factor, a ramp between;
                cos and sin · (0.1·ln(factor) + 1)                               Peng et al. 2023
llama3          by wavelength: short unchanged, long / factor, smooth between    Grattafiori et al. 2024
longrope        one factor per pair; one list up to `original` tokens, another beyond  Ding et al. 2024
proportional    f / factor for the first fraction · pairs, 0 for the others, which do not turn        Gemma 4
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from dovetail.nn.groups import Scaling, ScalingProof
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, register
from dovetail.spec.scope import Scope

MAX_FACTOR = 1e6  # in float32, dynamic NTK loses a factor above 2²⁴


def _frequencies(base: Tensor | float, like: Tensor) -> Tensor:
    """base^(−i/pairs); a base per token (…) gives frequencies per token (…, pairs)."""
    steps = torch.arange(like.shape[-1], dtype=like.dtype, device=like.device) / like.shape[-1]
    return base[..., None] ** -steps if isinstance(base, Tensor) else base**-steps


def _several_pairs(scope: Scope) -> list[Problem]:
    return (
        []
        if scope.size("pair") > 1
        else [Problem("scaling", "needs at least 2 rotated pairs of channels, not 1", "raise `fraction` or the head size")]
    )


def _ntk_power(pairs: int) -> float:
    return 2 * pairs / (2 * pairs - 2)


@register("linear_scaling")
class LinearScaling(Scaling):
    """Position interpolation: positions are divided by `factor`."""

    factor: float = bounded(2.0, at_least=1, at_most=MAX_FACTOR)

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        return plain / self.factor


class LinearScalingProof(ScalingProof, of=LinearScaling):
    """Sampled values."""

    samples = {"factor": [2.0, 4.0]}


@register("ntk")
class Ntk(Scaling):
    """NTK-aware scaling: a larger base. High frequencies hardly change, the lowest is divided by `factor`."""

    factor: float = bounded(2.0, at_least=1, at_most=MAX_FACTOR)

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        return _frequencies(base * self.factor ** _ntk_power(plain.shape[-1]), plain)

    def check(self, scope: Scope) -> list[Problem]:
        return _several_pairs(scope)


class NtkProof(ScalingProof, of=Ntk):
    """Sampled values."""

    samples = {"factor": [2.0, 4.0]}


@register("dynamic_ntk")
class DynamicNtk(Scaling):
    """Dynamic NTK scaling: the base grows with the current length of the sequence."""

    varies: ClassVar[bool] = True
    factor: float = bounded(2.0, at_least=1, at_most=MAX_FACTOR)
    original: int = bounded(2048, above=0)

    def limit(self) -> int:
        return self.original

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        return plain

    def at_length(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        over = length.clamp_min(self.original).to(plain.dtype) / self.original
        grown = self.factor * over - (self.factor - 1)
        return _frequencies(base * grown ** _ntk_power(plain.shape[-1]), plain)

    def check(self, scope: Scope) -> list[Problem]:
        return _several_pairs(scope)


class DynamicNtkProof(ScalingProof, of=DynamicNtk):
    """Sampled values."""

    samples = {"factor": [2.0, 4.0], "original": [8, 6]}


@register("yarn")
class Yarn(Scaling):
    """YaRN: high frequencies unchanged, low ones interpolated, a ramp between; cos and sin are scaled by `attention`."""

    factor: float = bounded(4.0, at_least=1, at_most=MAX_FACTOR)
    original: int = bounded(2048, above=0)
    beta_fast: float = bounded(32.0, above=0)
    beta_slow: float = bounded(1.0, above=0)
    attention: float | None = bounded(None, above=0)  # cos and sin are multiplied by it; by default 0.1·ln(factor) + 1
    truncate: bool = True

    def limit(self) -> int:
        return self.original

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        dim = 2 * plain.shape[-1]
        low, high = (
            dim * log(self.original / (turns * 2 * pi)) / (2 * log(base)) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        steps = torch.arange(plain.shape[-1], dtype=plain.dtype)
        ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return plain * (1 - ramp) + plain / self.factor * ramp

    def amplitude(self) -> float:
        return 0.1 * log(self.factor) + 1.0 if self.attention is None else self.attention

    def check(self, scope: Scope) -> list[Problem]:
        return _several_pairs(scope)


class YarnProof(ScalingProof, of=Yarn):
    """Sampled values."""

    samples = {
        "factor": [4.0, 8.0],
        "original": [200, 1000],
        "beta_fast": [8.0, 0.25],
        "beta_slow": [1.0, 0.001],
        "attention": [None, 1.3],
        "truncate": [False, True],
    }


@register("llama3")
class Llama3(Scaling):
    """Llama 3 scaling: short wavelengths unchanged, long ones divided by `factor`, interpolated between."""

    factor: float = bounded(8.0, at_least=1, at_most=MAX_FACTOR)
    original: int = bounded(8192, above=0)
    low: float = bounded(1.0, above=0)  # wavelengths longer than original/low are divided
    high: float = bounded(4.0, above=0)  # those shorter than original/high are unchanged

    def limit(self) -> int:
        return self.original

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        turns = self.original * plain / (2 * pi)  # full rotations of a pair within the original length
        smooth = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - smooth) * plain / self.factor + smooth * plain

    def check(self, scope: Scope) -> list[Problem]:
        if self.high <= self.low:
            return [Problem("scaling.high", f"{self.high} is not above low, {self.low}")]
        return []


class Llama3Proof(ScalingProof, of=Llama3):
    """Sampled values."""

    samples = {"factor": [8.0, 2.0], "original": [16, 40], "low": [0.1, 0.5], "high": [4.0, 2.0]}


@register("longrope")
class LongRope(Scaling):
    """LongRoPE: one factor per pair, from one list up to the original length and from another beyond."""

    varies: ClassVar[bool] = True
    short: tuple[float, ...] = bounded((1.0,), above=0)
    long: tuple[float, ...] = bounded((1.0,), above=0)
    original: int = bounded(4096, at_least=2)
    # new context length / original; sets the amplitude of cos and sin
    factor: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    attention: float | None = bounded(None, above=0)

    def limit(self) -> int:
        return self.original

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        return plain / self._list(self.short, plain)

    def at_length(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        beyond = (length > self.original)[..., None]
        return torch.where(beyond, plain / self._list(self.long, plain), plain / self._list(self.short, plain))

    def _list(self, factors: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(factors, dtype=like.dtype, device=like.device)  # a single factor broadcasts to all pairs

    def amplitude(self) -> float:
        if self.attention is not None:
            return self.attention
        return 1.0 if self.factor <= 1 else sqrt(1 + log(self.factor) / log(self.original))

    def check(self, scope: Scope) -> list[Problem]:
        pairs = scope.size("pair")
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) not in (1, pairs):
                return [Problem(f"scaling.{name}", f"{len(factors)} factors for {pairs} pairs", f"give 1 or {pairs}")]
        if self.attention is not None and self.factor != 1.0:
            return [Problem("scaling.factor", "has no effect where `attention` is given", "remove one of the two")]
        return []


class LongRopeProof(ScalingProof, of=LongRope):
    """Sampled values."""

    samples = {
        "short": [(1.0,), (1.1,)],
        "long": [(3.0,), (2.0,)],
        "original": [8, 6],
        "factor": [1.0, 4.0],
        "attention": [None, 1.2],
    }


@register("proportional")
class Proportional(Scaling):
    """Proportional RoPE: only the first pairs are rotated, with their frequencies among all pairs (Gemma 4).

    Pairs of halves reach over the whole head, where RoPE's own `fraction` pairs the first channels among themselves."""

    fraction: float = bounded(0.25, above=0, at_most=1)  # of the pairs, the first ones, that are rotated
    factor: float = bounded(1.0, at_least=1, at_most=MAX_FACTOR)

    def rotated_pairs(self, pairs: int) -> int:
        """The number of rotated pairs."""
        return int(self.fraction * (2 * pairs) // 2)

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        rotated = torch.arange(len(plain)) < self.rotated_pairs(len(plain))
        return torch.where(rotated, plain / self.factor, 0.0)

    def check(self, scope: Scope) -> list[Problem]:
        pairs = scope.size("pair")
        if self.rotated_pairs(pairs) > 0:
            return []
        what = f"a fraction of {self.fraction} of {pairs} pairs rotates none"
        return [Problem("scaling.fraction", what, f"use at least {1 / pairs:.3g}")]


class ProportionalProof(ScalingProof, of=Proportional):
    """Sampled values."""

    samples = {"fraction": [0.5, 1.0], "factor": [1.0, 3.0]}
