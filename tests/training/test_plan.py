import math

import pytest

from dovetail.training.plan import Plan

WRONG = [{}, {"steps": 0}, {"minutes": -1.0}, {"steps": 3, "learning_rate": math.nan}, {"steps": 3, "warmup_fraction": 2}]


@pytest.mark.parametrize("fields", WRONG)
def test_a_plan_without_sense_is_refused(fields):
    with pytest.raises(ValueError, match=r"end|above 0|from 0 to 1"):
        Plan(**fields)


def test_the_rate_warms_up_and_falls_along_a_cosine():
    plan = Plan(steps=100, learning_rate=2.0, warmup=10, floor=0.1)
    assert plan.lr(0, 0.0) == pytest.approx(0.2)
    assert plan.lr(4, 0.0) == pytest.approx(1.0)
    assert plan.lr(50, 0.5) == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert plan.lr(75, 0.75) == pytest.approx(2 * (0.1 + 0.9 * (1 - 1 / math.sqrt(2)) / 2))
    assert plan.lr(100, 1.0) == pytest.approx(0.2)
    assert Plan(steps=8, minutes=1.0).fraction_done(2, 30.0) == 0.5
    assert Plan(steps=8, minutes=1.0).fraction_done(6, 30.0) == 0.75


def test_the_warm_up_is_a_fraction_of_the_run():
    plan = Plan(steps=1000, learning_rate=1.0, warmup_fraction=0.1, floor=1.0)
    assert plan.lr(0, 0.0) == pytest.approx(0.01)
    assert plan.lr(49, 0.049) == pytest.approx(0.5)
    assert plan.lr(99, 0.099) == plan.lr(500, 0.5) == 1.0
    timed = Plan(minutes=1.0, learning_rate=1.0, warmup_fraction=0.1, floor=1.0)
    assert 0 < timed.lr(0, 0.0) < 0.05
    assert timed.lr(4, 0.04) == pytest.approx(0.5)  # the fifth step will end at 0.05 of the run
    assert Plan(steps=10, learning_rate=1.0, warmup_fraction=0.0, floor=1.0).lr(0, 0.0) == 1.0
