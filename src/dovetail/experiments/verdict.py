"""The verdict on an arm: better, worse, equal within the smallest difference that matters, or unresolved, with the seeds that
would resolve it.

    equal        the interval lies within ± smallest
    better       it excludes 0, in favor of the arm; worse: against it
    unresolved   none of these; about n more seeds are needed, if mean and spread stay as they are

The arms of a lab share one level: with m comparisons each interval has the level 1 − α/m (Bonferroni), so that the probability
that any interval of any arm ever misses its mean is at most α, whenever and however often somebody looks.

Seeds are read in their order, and the first n at which a verdict is in decides. So the verdict depends on the losses
only, not on which process finished first, or on how many seeds ran ahead.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Sequence
from typing import Any, Literal

from dovetail.experiments.confidence import PairedInterval, differences, half_width, interval

VerdictKind = Literal["better", "worse", "equal", "unresolved", "diverged"]
ALPHA = 0.05  # of all arms together
MOST_SEEDS = 10_000  # that a forecast reaches


@dc.dataclass(frozen=True)
class ArmVerdict:
    """What the seeds say of an arm against what it is compared with; `interval` is of arm − base."""

    kind: VerdictKind
    interval: PairedInterval
    smallest: float
    more: int | None = None  # seeds that would resolve it; None: resolved, or more than MOST_SEEDS
    correlation: float = math.nan  # of the two losses over seeds
    saved: float = math.nan  # 1 − the variance of the paired difference ÷ that of an unpaired one
    diverged: tuple[int, ...] = ()  # positions of seeds at which a loss is not finite

    @property
    def resolved(self) -> bool:
        """Whether no further seed is needed."""
        return self.kind != "unresolved"

    def __str__(self) -> str:
        at = self.interval
        if self.kind == "diverged":
            return f"diverged at {len(self.diverged)} of {at.n} seeds"
        found = "no interval yet" if math.isinf(at.half) else f"{at.low:+.4f} to {at.high:+.4f}"
        if self.kind == "equal":
            return f"equal within {self.smallest:g} ({found}) at {at.n} seeds"
        if self.kind != "unresolved":
            return f"{self.kind} by {abs(at.mean):.4f} ({found}) at {at.n} seeds"
        if at.n < 2:
            return "unresolved: an interval needs two seeds"
        needed = f"more than {MOST_SEEDS:,}" if self.more is None else f"about {self.more:,}"
        return f"unresolved: {at.mean:+.4f} ({found}) at {at.n} seeds; {needed} more would be needed"

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain data."""
        at = self.interval
        return {
            "verdict": self.kind,
            "text": str(self),
            "mean": at.mean,
            "low": at.low,
            "high": at.high,
            "sd": at.sd,
            "seeds": at.n,
            "level": 1 - at.alpha,
            "more_seeds": self.more,
            "variance_saved": self.saved,
        }


def judge(
    arm: Sequence[float],
    base: Sequence[float],
    *,
    smallest: float = 0.0,
    at_least: int = 2,
    alpha: float = ALPHA,
    comparisons: int = 1,
    higher_is_better: bool = False,
) -> ArmVerdict:
    """Return the verdict at the first number of seeds, from `at_least` on, at which it is in; else that of all seeds.

    The metrics of `arm` and `base` are in the order of the seeds. `comparisons` is the number of arms that are judged together.
    A loss that is not finite is no number to average: the arm is then called diverged.
    """
    broken = next((i for i, value in enumerate(differences(arm, base)) if not math.isfinite(value)), len(arm))
    last = min(len(arm), broken + 1)  # no seed after one without a loss changes the verdict
    level = alpha / comparisons
    looks = ((n, interval(differences(arm[:n], base[:n]), level)) for n in range(at_least, last))
    n = next((n for n, at in looks if _kind(at, smallest, higher_is_better) != "unresolved"), last)
    verdict = _judge_once(arm[:n], base[:n], smallest, level, higher_is_better)
    return dc.replace(verdict, kind="unresolved") if last < at_least and verdict.kind != "diverged" else verdict


def _judge_once(arm: Sequence[float], base: Sequence[float], smallest: float, alpha: float, higher: bool) -> ArmVerdict:
    sample = differences(arm, base)
    broken = tuple(i for i, value in enumerate(sample) if not math.isfinite(value))
    if broken:
        return ArmVerdict(
            "diverged", PairedInterval(len(sample), math.nan, math.nan, math.inf, alpha), smallest, None, diverged=broken
        )
    at = interval(sample, alpha)
    kind = _kind(at, smallest, higher)
    more = seeds_needed(at, smallest) if kind == "unresolved" else None
    return ArmVerdict(kind, at, smallest, more, *pairing(arm, base))


def _kind(at: PairedInterval, smallest: float, higher: bool) -> VerdictKind:
    if at.is_within(smallest):
        return "equal"
    if at.excludes_zero:
        return "better" if (at.mean > 0) == higher else "worse"
    return "unresolved"


def seeds_needed(at: PairedInterval, smallest: float) -> int | None:
    """How many more seeds would resolve a verdict if mean and standard deviation stay as they are; None: over MOST_SEEDS."""
    if at.n < 2:
        return None
    far, near = abs(at.mean), smallest - abs(at.mean)  # to exclude 0; to be within ± smallest
    reach = max(far, near)
    low, high = at.n, MOST_SEEDS
    if half_width(high, at.sd, at.alpha) >= reach:
        return None
    while high - low > 1:  # the interval shrinks with n
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(middle, at.sd, at.alpha) < reach else (middle, high)
    return high - at.n


def pairing(arm: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the correlation of two sequences of losses over seeds, and the variance that pairing saves,
    1 − Var(x − y) / (Var x + Var y); it is negative where the pairs are worse than independent seeds."""
    n = len(arm)
    if n < 2:
        return math.nan, math.nan
    x, y = ([value - math.fsum(one) / n for value in one] for one in (arm, base))
    xx, yy, xy = (math.fsum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (y, y), (x, y)))
    if xx == 0 or yy == 0:
        return math.nan, math.nan
    return xy / math.sqrt(xx * yy), 2 * xy / (xx + yy)
