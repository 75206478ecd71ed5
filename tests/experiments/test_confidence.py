"""The confidence sequence, by simulation and against scipy's t distributions. tests/planted/lab_statistics.py has bugs that
these tests must see."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from dovetail.experiments.confidence import G, PairedInterval, e_value, half_width, interval, t_limit
from dovetail.experiments.design import LabDesign
from dovetail.experiments.verdict import judge, pairing, seeds_needed

ALPHA = 0.05
LABS = 600
MOST = 30  # seeds


def peeking_errors(looks: Callable[[Sequence[float]], bool], labs: int, most: int, first: int = 3) -> float:
    """The fraction of labs, whose true difference is 0, in which a look after some seed finds one."""
    noise = np.random.default_rng(0).standard_normal((labs, most))
    return float(np.mean([any(looks(row[:n].tolist()) for n in range(first, most + 1)) for row in noise]))


@functools.cache
def fixed_n(n: int, alpha: float) -> float:
    """The limit of a t test at one n, looked at after every seed."""
    return float(stats.t.ppf(1 - alpha / 2, n - 1) ** 2 / (n - 1)) if n > 1 else math.inf


@pytest.mark.parametrize("n", [2, 5, 13])
@pytest.mark.parametrize("shift", [0.0, 0.4, 2.0])
def test_the_e_value_is_the_mixture_of_noncentral_t_likelihoods(n: int, shift: float) -> None:
    sample = (np.random.default_rng(n).standard_normal(n) + shift).tolist()
    t = float(stats.ttest_1samp(sample, 0.0).statistic)

    def weighted(delta: float) -> float:
        return float(stats.nct.pdf(t, n - 1, delta * math.sqrt(n)) * stats.norm.pdf(delta, scale=math.sqrt(G)))

    mixture, _ = integrate.quad(weighted, -12, 12, limit=400, points=[0.0, t / math.sqrt(n)])
    assert e_value(sample) == pytest.approx(mixture / stats.t.pdf(t, n - 1), rel=1e-3)


def test_the_interval_ends_where_the_e_value_reaches_one_over_alpha() -> None:
    sample = (np.random.default_rng(3).standard_normal(8) * 0.02 + 0.01).tolist()
    at = interval(sample, ALPHA)
    for end in (at.low, at.high):
        assert e_value(sample, end) == pytest.approx(1 / ALPHA, rel=1e-9)
    assert e_value(sample, at.mean) < 1 < 1 / ALPHA < e_value(sample, at.high + at.half)


def test_looking_after_every_seed_errs_at_most_at_the_level_where_a_t_test_errs_far_more_often() -> None:
    ours = peeking_errors(lambda d: interval(d, ALPHA).excludes_zero, LABS, MOST)
    peeking = peeking_errors(
        lambda d: len(d) * np.mean(d) ** 2 > fixed_n(len(d), ALPHA) * (len(d) - 1) * np.var(d, ddof=1), 200, MOST
    )
    assert 0.005 < ours <= ALPHA  # and it is not empty: intervals that are far too wide would never err
    assert peeking > 0.15


def test_the_mean_of_e_values_under_the_null_is_one() -> None:
    noise = np.random.default_rng(1).standard_normal((20_000, 3))
    assert np.mean([min(e_value(row.tolist()), 1e4) for row in noise]) == pytest.approx(1.0, abs=0.1)


def errors_of_labs(comparisons: int) -> float:
    """The fraction of labs, without a difference, that call any arm different."""
    noise = np.random.default_rng(2).standard_normal((400, comparisons, 20))
    base = [0.0] * 20
    wrong = [
        any(judge(arm.tolist(), base, at_least=3, comparisons=comparisons).kind != "unresolved" for arm in lab) for lab in noise
    ]
    return float(np.mean(wrong))


def test_three_arms_share_one_level() -> None:
    assert 0.005 < errors_of_labs(1) <= ALPHA
    assert 0.005 < errors_of_labs(3) <= ALPHA


def test_a_difference_of_four_standard_errors_is_found_within_twenty_seeds() -> None:
    noise = np.random.default_rng(4).standard_normal((500, 20)) + 4 / math.sqrt(10)
    found = [judge(row.tolist(), [0.0] * 20, at_least=5, comparisons=2).kind == "worse" for row in noise]
    assert np.mean(found) >= 0.9


def test_labs_of_resampled_real_runs_keep_level_and_power_at_the_default_number_of_seeds() -> None:
    """The paired differences of these runs are skewed. benchmarks/lab.py calls `judge` on fewer labs."""
    pool = json.loads((Path(__file__).parents[2] / "docs/figures/lab_pool.json").read_text(encoding="utf-8"))
    paired = np.array([np.subtract(pool[name], pool["base"]) for name in pool if name != "base"])
    draw, n = np.random.default_rng(7), np.arange(1, MOST + 1)
    limits = np.array([t_limit(k, ALPHA / len(paired)) for k in range(1, MOST + 1)])

    def rejected(effect: float) -> np.ndarray:
        """(labs, arms, seeds) whether 0 is outside the interval."""
        centered = paired - paired.mean(1, keepdims=True) + effect * paired.std(1, ddof=1, keepdims=True)
        sample = centered[:, draw.integers(paired.shape[1], size=(10_000, MOST))].transpose(1, 0, 2)
        mean = sample.cumsum(2) / n
        return n * mean**2 > limits * np.maximum((sample**2).cumsum(2) - n * mean**2, 1e-12)

    assert rejected(0.0)[:, :, LabDesign.at_least - 1 :].any((1, 2)).mean() <= ALPHA
    assert rejected(4 / math.sqrt(10))[:, :, LabDesign.at_least - 1 : 20].any(2).mean() >= 0.9


def labs_of_pairs(labs: int, most: int, correlation: float, difference: float = 0.0) -> np.ndarray:
    """(labs, 2, seeds) losses of an arm and of the base."""
    root = np.linalg.cholesky(np.array([[1.0, correlation], [correlation, 1.0]]))
    losses = np.einsum("ij,ljn->lin", root, np.random.default_rng(5).standard_normal((labs, 2, most)))
    losses[:, 0] += difference
    return losses


def test_pairing_saves_variance_and_seeds() -> None:
    paired, independent = (labs_of_pairs(200, 20, correlation, 0.6) for correlation in (0.9, 0.0))
    found = [
        np.mean([judge(a.tolist(), b.tolist(), at_least=5).kind == "worse" for a, b in labs]) for labs in (paired, independent)
    ]
    assert found[0] > 0.85 > 0.5 > found[1]
    saved = np.mean([pairing(a.tolist(), b.tolist())[1] for a, b in paired])
    assert saved == pytest.approx(0.9, abs=0.03)


def test_the_interval_of_anticorrelated_arms_is_wide_enough() -> None:
    labs = labs_of_pairs(400, 20, -0.9)
    assert np.mean([judge(a.tolist(), b.tolist(), at_least=3).kind != "unresolved" for a, b in labs]) <= ALPHA


# -- verdicts ---------------------------------------------------------------------------------------------------------


def losses(*differences: float) -> tuple[list[float], list[float]]:
    base = [2.0 + 0.1 * i for i in range(len(differences))]
    return [b + d for b, d in zip(base, differences, strict=True)], base


def test_each_verdict_is_reached() -> None:
    wiggle = [0.001, -0.001, 0.002, -0.002, 0.0, 0.001, -0.001]
    better, worse, equal = (losses(*(middle + w for w in wiggle)) for middle in (-0.1, 0.1, 0.0))
    assert judge(*better, at_least=5).kind == "better"
    assert judge(*worse, at_least=5).kind == "worse"
    assert judge(*better, at_least=5, higher_is_better=True).kind == "worse"
    assert judge(*equal, at_least=5, smallest=0.02).kind == "equal"
    assert judge(*equal, at_least=5).kind == "unresolved"
    noisy = judge(*losses(0.1, -0.3, 0.2, -0.1, 0.4), at_least=5, smallest=0.02)
    assert noisy.kind == "unresolved"
    assert noisy.more is not None
    assert noisy.more > 5
    assert "more would be needed" in str(noisy)


def test_a_difference_that_is_certain_and_does_not_matter_is_equal() -> None:
    wiggle = [0.0001, -0.0001, 0.0002, -0.0002, 0.0]
    assert judge(*losses(*(0.005 + w for w in wiggle)), at_least=5, smallest=0.02).kind == "equal"
    assert judge(*losses(*(0.005 + w for w in wiggle)), at_least=5).kind == "worse"


def test_the_first_seeds_that_decide_are_those_of_the_verdict() -> None:
    first = [0.1, 0.101, 0.099, 0.1005, 0.0995]
    arm, base = losses(*first, -5.0, 3.0, -9.0)
    assert judge(arm, base, at_least=5) == judge(arm[:5], base[:5], at_least=5)
    assert judge(arm, base, at_least=6).kind == "unresolved"


def test_seeds_before_the_least_number_decide_nothing() -> None:
    arm, base = losses(*[0.1, 0.1001, 0.0999, 0.1, 0.1001])
    assert judge(arm, base, at_least=5).kind == "worse"
    assert judge(arm[:4], base[:4], at_least=5).interval.n == 4
    assert judge(arm, base, at_least=5).interval.n == 5


def test_a_loss_that_is_not_finite_is_not_averaged() -> None:
    arm, base = losses(0.1, 0.1, 0.1)
    verdict = judge([arm[0], math.nan, arm[2]], base, at_least=3)
    assert (verdict.kind, verdict.diverged) == ("diverged", (1,))
    assert str(verdict) == "diverged at 1 of 2 seeds"


def test_equal_runs_are_equal_and_one_seed_says_nothing() -> None:
    assert judge([2.0] * 5, [2.0] * 5, smallest=0.01, at_least=2).kind == "equal"
    assert judge([2.0] * 5, [2.0] * 5, at_least=2).kind == "unresolved"
    one = judge([2.0], [1.0], at_least=2, smallest=0.1)
    assert (one.kind, str(one)) == ("unresolved", "unresolved: an interval needs two seeds")


@pytest.mark.parametrize(("mean", "smallest"), [(0.5, 0.0), (0.0, 0.3), (0.02, 0.4)])
def test_the_forecast_is_the_first_number_of_seeds_that_resolves(mean: float, smallest: float) -> None:
    at = PairedInterval(5, mean, 1.0, half_width(5, 1.0, ALPHA), ALPHA)
    more = seeds_needed(at, smallest)
    assert more is not None

    def resolves(n: int) -> bool:
        later = PairedInterval(n, mean, 1.0, half_width(n, 1.0, ALPHA), ALPHA)
        return later.excludes_zero or later.is_within(smallest)

    assert resolves(at.n + more)
    assert not resolves(at.n + more - 1)
    assert seeds_needed(PairedInterval(5, 0.0, 1.0, math.inf, ALPHA), 0.0) is None
