import math

import pytest

from dovetail.training.plan import Plan

WRONG = [
    {},
    {"steps": 0},
    {"minutes": -1.0},
    {"steps": 3, "learning_rate": math.nan},
    {"steps": 3, "warmup": 2},
    {"steps": 3, "ema": 1.0},
    {"steps": 3, "floor": -0.1},
]


@pytest.mark.parametrize("fields", WRONG)
def test_a_plan_without_sense_is_refused(fields):
    with pytest.raises(ValueError, match=r"end|above 0|from 0 to"):
        Plan(**fields)


def test_the_rate_warms_up_and_falls_along_a_cosine():
    plan = Plan(steps=100, learning_rate=2.0, warmup_steps=10, floor=0.1)
    assert plan.lr(0) == pytest.approx(0.2)
    assert plan.lr(4) == pytest.approx(1.0, rel=0.01)
    assert plan.lr(50) == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert plan.lr(75) == pytest.approx(2 * (0.1 + 0.9 * (1 - 1 / math.sqrt(2)) / 2))
    assert plan.lr(99) == pytest.approx(0.2, rel=0.01)


def test_the_other_schedules():
    fields = {"steps": 100, "learning_rate": 2.0, "warmup_steps": 0, "floor": 0.2}
    linear, wsd, constant = (Plan(schedule=kind, **fields) for kind in ("linear", "wsd", "constant"))
    assert [linear.lr(step) for step in (0, 50)] == pytest.approx([2.0, 2 * 0.6])
    assert [wsd.lr(step) for step in (0, 50, 80, 90, 99)] == pytest.approx([2.0, 2.0, 2.0, 2 * 0.6, 2 * (1 - 0.8 * 0.95)])
    assert [constant.lr(step) for step in (0, 50, 99)] == [2.0, 2.0, 2.0]
    assert Plan(schedule="wsd", cooldown=0.0, **fields).lr(99) == 2.0


def test_the_warm_up_is_a_fraction_of_the_run():
    plan = Plan(steps=1000, learning_rate=1.0, warmup=0.1, floor=1.0)
    assert plan.lr(0) == pytest.approx(0.01)
    assert plan.lr(49) == pytest.approx(0.5)
    assert plan.lr(99) == plan.lr(500) == 1.0
    assert Plan(steps=10, learning_rate=1.0, warmup=0.0, floor=1.0).lr(0) == 1.0


def test_a_run_by_minutes_sets_its_steps_by_the_first_ones():
    plan = Plan(minutes=1.0, learning_rate=1.0, warmup=0.1)
    assert 0 < plan.lr(0) < plan.lr(2) < 0.05
    assert [step for step in range(1, 9) if plan.is_measured(step)] == [3]
    assert [step for step in range(1, 9) if plan.is_measured(step, first=2)] == [5]  # of a run that was resumed before
    assert not Plan(steps=9).is_measured(3)
    assert plan.measured(3, 1.0) == 123  # two steps of half a second
    assert Plan(minutes=1.0, steps=50).measured(3, 1.0) == 50
    assert Plan(minutes=1.0, steps=2).done(2) == 1.0
