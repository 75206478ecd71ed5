"""An anytime-valid confidence sequence for the mean of paired differences: the t mixture of Wang & Ramdas (2025).

    dᵢ = xᵢ − yᵢ                 the difference of two arms at seed i, with the same batches and shared initial weights
    Tₙ(m) = n (d̄ₙ − m)² / Sₙ     Sₙ = Σ (dᵢ − d̄ₙ)², so that Tₙ = t² / (n − 1)
    eₙ(m) = (1 + gn)^−½ · ((1 + Tₙ) / (1 + Tₙ / (1 + gn)))^(n/2)

eₙ(m) is the likelihood ratio of "the mean is m + δσ with δ ~ N(0, g)" against "the mean is m"; the unknown σ has its right
Haar prior. If the differences are normal with mean m, it is a martingale that starts at 1, and exceeds 1/α at any n ever with
probability at most α (Ville). The interval is the set of means that were not rejected at n, {m: eₙ(m) < 1/α}, in closed form:

    d̄ₙ ± √(T* Sₙ / n)     T* = (R − 1) / (1 − R / (1 + gn)),  R = ((1 + gn) / α²)^(1/n);  unbounded where R ≥ 1 + gn

So the interval holds at every n at the same time, and a lab may look after each seed and stop when it likes. A t interval holds
at one n that was fixed before. What is paid: at n = 20 and α = 0.05 it is 1.6 times as wide as the t interval.

Losses are not bounded, so no empirical Bernstein bound applies; that differences are near normal is an assumption, which
benchmarks/lab.py tests on losses of real runs.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Sequence

G = 1.0  # variance of the prior of δ, the mean in standard deviations: near the shortest intervals at 14 to 30 seeds


@dc.dataclass(frozen=True)
class PairedInterval:
    """The interval of the mean difference after n pairs, at the level 1 − alpha."""

    n: int
    mean: float
    sd: float  # of a difference
    half: float  # half of the width; infinite if n is too small for an interval
    alpha: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        """Whether the arms differ."""
        return self.low > 0 or self.high < 0

    def is_within(self, smallest: float) -> bool:
        """Whether every mean in the interval is smaller than `smallest`, in either direction."""
        return -smallest < self.low and self.high < smallest


def differences(arm: Sequence[float], base: Sequence[float]) -> list[float]:
    """The difference at each seed; the two sequences have the seeds in one order."""
    return [a - b for a, b in zip(arm, base, strict=True)]


def interval(sample: Sequence[float], alpha: float) -> PairedInterval:
    """The confidence sequence at n = len(sample)."""
    n = len(sample)
    mean = math.fsum(sample) / n
    sd = math.sqrt(math.fsum((d - mean) ** 2 for d in sample) / (n - 1)) if n > 1 else math.nan
    return PairedInterval(n, mean, sd, half_width(n, sd, alpha), alpha)


def half_width(n: int, sd: float, alpha: float) -> float:
    """Half of the width of the interval, of n differences with this standard deviation."""
    limit = t_limit(n, alpha)
    return math.inf if n < 2 or math.isinf(limit) else sd * math.sqrt(limit * (n - 1) / n)


def t_limit(n: int, alpha: float) -> float:
    """T*: the largest Tₙ that does not reject, where e reaches 1/α; infinite if none rejects."""
    k = 1 + G * n
    root = math.exp((math.log(k) - 2 * math.log(alpha)) / n)
    return (root - 1) / (1 - root / k) if root < k else math.inf


def e_value(sample: Sequence[float], mean: float = 0.0) -> float:
    """eₙ(mean), the evidence against this mean: 1/e is a p-value that may be looked at after every seed."""
    n = len(sample)
    center = math.fsum(sample) / n
    spread = math.fsum((d - center) ** 2 for d in sample)
    k = 1 + G * n
    if spread == 0:
        return 1.0 if n < 2 or center == mean else math.inf
    t = n * (center - mean) ** 2 / spread
    return math.exp(min(700.0, 0.5 * n * (math.log1p(t) - math.log1p(t / k)) - 0.5 * math.log(k)))
