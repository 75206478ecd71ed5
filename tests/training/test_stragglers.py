"""Which ranks are named as slow."""

from __future__ import annotations

import time

from dovetail.parallel.collective import waiting
from dovetail.training.ranks import WINDOW, Stragglers

HOSTS = ["node-0", "node-1", "node-2", "node-3"]


def after(stragglers: Stragglers, *seconds: float, steps: int = WINDOW, first: int = 0) -> str | None:
    """What is reported after some steps of these seconds; nothing may be before."""
    for step in range(first, first + steps):
        stragglers.add(seconds)
        found = stragglers.changed(step + 1)
        if found is not None:
            assert step == first + steps - 1, "reported too early"
            return found
    return None


def test_a_rank_that_is_slow_over_a_window_is_named_once_and_again_when_it_recovers() -> None:
    stragglers = Stragglers(HOSTS)
    line = after(stragglers, 0.1, 0.1, 0.31, 0.11)
    assert line == (
        f"steps 1 to {WINDOW}: rank 2 (node-2) is slow: 0.310 s of its own work per step, 3.1 times the median rank's"
    )
    assert after(stragglers, 0.1, 0.1, 0.31, 0.11, first=WINDOW) is None
    assert after(stragglers, 0.1, 0.1, 0.1, 0.1, first=2 * WINDOW) == (
        f"steps {2 * WINDOW + 1} to {3 * WINDOW}: no rank is slow any more"
    )


def test_of_two_ranks_the_slower_is_named() -> None:
    line = after(Stragglers(HOSTS[:2]), 0.2, 0.1)
    assert line is not None
    assert "rank 0 (node-0) is slow" in line
    assert "2.0 times" in line


def test_equal_ranks_and_single_slow_steps_are_not_named() -> None:
    stragglers = Stragglers(HOSTS)
    assert after(stragglers, 0.1, 0.12, 0.14, 0.11) is None
    assert after(stragglers, 0.1, 0.1, 0.1, 9.0, steps=WINDOW // 4) is None
    assert after(stragglers, 0.1, 0.1, 0.1, 0.1, steps=WINDOW - WINDOW // 4) is None
    assert after(Stragglers(HOSTS), 0.0, 0.0, 0.0, 0.0) is None


def test_the_imbalance_of_a_step_is_the_slowest_rank_over_the_median() -> None:
    stragglers = Stragglers(HOSTS)
    assert stragglers.imbalance is None
    stragglers.add((0.1, 0.2, 0.1, 0.4))
    assert stragglers.imbalance == 4.0


def test_time_inside_collectives_is_no_work() -> None:
    stragglers = Stragglers(HOSTS[:1])
    assert stragglers.seconds() == 0
    stragglers.begin()
    waiting.timed(time.sleep)(0.2)
    assert stragglers.seconds() < 0.15
    time.sleep(0.2)
    assert stragglers.seconds() >= 0.2
