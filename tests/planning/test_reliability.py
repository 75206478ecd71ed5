"""Interruptions, checkpoints and goodput against known numbers."""

from __future__ import annotations

import pytest

from dovetail.planning.report import DAY, GPU_HOURS_PER_INTERRUPTION, HOUR, reliability, young_daly


def test_the_rate_is_that_of_llama_3() -> None:
    assert pytest.approx(50_700, rel=1e-3) == GPU_HOURS_PER_INTERRUPTION
    found = reliability(1, 16384, write_bandwidth=1.0, restart_seconds=0.0)
    assert found.between_interruptions / HOUR == pytest.approx(3.09, abs=0.01)
    assert found.interruptions(54 * DAY) == pytest.approx(419)


def test_young_daly() -> None:
    assert young_daly(60.0, 3 * HOUR) == pytest.approx(1138.4, abs=0.1)


def test_the_interval_loses_the_least() -> None:
    taken, between = 30.0, 10_000.0
    best = young_daly(taken, between)

    def lost(interval: float) -> float:
        return taken / interval + interval / 2 / between

    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))
    found = reliability(300, 8, write_bandwidth=10.0, restart_seconds=0.0, gpu_hours=between * 8 / HOUR)
    assert (found.interval, found.goodput) == (pytest.approx(best), pytest.approx(1 - lost(best)))


def test_restarts_take_their_share() -> None:
    without, slow = (reliability(10**9, 1024, write_bandwidth=1e9, restart_seconds=s) for s in (0.0, 600.0))
    assert without.goodput - slow.goodput == pytest.approx(600 / without.between_interruptions)


def test_a_run_that_only_restarts_has_no_goodput() -> None:
    assert reliability(10**15, 10**6, write_bandwidth=1e9, restart_seconds=600.0).goodput == 0.0
