"""Bugs planted by hand in the statistics of a lab, each with the test that must fail with it (tests/experiments)."""

from __future__ import annotations

from bugs import Bug

STATISTICS: dict[Bug, str] = {
    Bug(
        "experiments",
        "confidence.py",
        "differences",
        "zip(arm, base, strict=True)",
        "zip(arm, [*base[1:], base[0]], strict=True)",
        "the variance is that of unpaired seeds",
    ): "test_confidence.test_pairing_saves_variance_and_seeds",
    Bug(
        "experiments",
        "confidence.py",
        "t_limit",
        "2 * math.log(alpha)",
        "2 * math.log(2 * alpha)",
        "the level is one-sided: each end of the interval has all of it",
    ): "test_confidence.test_the_interval_ends_where_the_e_value_reaches_one_over_alpha",
    Bug(
        "experiments",
        "confidence.py",
        "t_limit",
        "    k = 1 + G * n\n",
        "    from scipy import stats\n\n"
        "    return float(stats.t.ppf(1 - alpha / 2, n - 1) ** 2 / (n - 1)) if n > 1 else math.inf\n"
        "    k = 1 + G * n\n",
        "a t test of fixed n is looked at after every seed",
    ): "test_confidence.test_looking_after_every_seed_errs_at_most_at_the_level_where_a_t_test_errs_far_more_often",
    Bug(
        "experiments",
        "confidence.py",
        "interval",
        "for d in sample) / (n - 1))",
        "for d in sample) / n)",
        "the variance is divided by n",
    ): "test_confidence.test_the_interval_ends_where_the_e_value_reaches_one_over_alpha",
    Bug(
        "experiments",
        "verdict.py",
        "judge",
        "alpha / comparisons",
        "alpha",
        "the arms do not share the level",
    ): "test_confidence.test_three_arms_share_one_level",
    Bug(
        "experiments",
        "verdict.py",
        "judge",
        "range(at_least, last)",
        "range(0)",
        "seeds that were trained ahead change a verdict that was in",
    ): "test_confidence.test_the_first_seeds_that_decide_are_those_of_the_verdict",
    Bug(
        "experiments",
        "verdict.py",
        "_kind",
        "(at.mean > 0) == higher",
        "at.mean > 0",
        "a higher loss is called better",
    ): "test_confidence.test_each_verdict_is_reached",
    Bug(
        "experiments",
        "lab.py",
        "LabState.trials",
        "TUNING_SEED + seed",
        "seed",
        "seeds of the tuning are read by verdicts",
    ): "test_lab.test_learning_rates_are_tuned_on_seeds_of_their_own",
}
