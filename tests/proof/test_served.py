"""Laws on a running server: public bugs, seeded in the mechanisms of a small server, are each caught by the law that
docs/servers.md names; the same server without them, with the same noise, passes."""

from __future__ import annotations

from math import inf

import pytest
from wrong_server import running

from dovetail.proof.answers import TokenStep
from dovetail.proof.laws.law import Outcome
from dovetail.proof.served.noise import row_gap
from dovetail.proof.served.run import SERVED, calibrated, opened

# bug of docs/servers.md -> the law that catches it, and how the server runs
BUGS: dict[str, tuple[str, dict]] = {
    "1": ("rescored", {}),
    "2": ("cached", {}),
    "3": ("cached", {"speculate": True}),
    "4": ("scored", {"speculate": True}),
    "5": ("lengths", {}),
    "6": ("split", {}),
    "7": ("concurrent", {}),
    "8": ("seeded", {}),
    "11": ("stops", {}),
    "12": ("scored", {"speculate": True}),
    "14": ("lengths", {}),
    "15": ("aborted", {}),
    "16": ("cached", {}),
    "17": ("scored", {}),
    "18": ("streamed", {}),
    "19": ("concurrent", {}),
    "20": ("scored", {}),
    "21": ("streamed", {}),
    "22a": ("cached", {}),
    "22b": ("concurrent", {}),
    "23": ("held_back", {}),
}
PROFILES = ("bfloat16", "heavy", "bfloat16", "float32")


def tried(*bugs: str, laws: tuple[str, ...] = (), seed: int = 0, dtype: str | None = None, **how) -> dict[str, Outcome]:
    with running(*bugs, **how) as server:
        case = calibrated(opened(server.url, seed=seed, dtype=dtype))
        return {name: SERVED.test(name, case) for name in SERVED.names(laws)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] if at % 4 else []) for at, bug in enumerate(BUGS)])
def test_a_public_bug_is_caught_by_its_law(bug: str) -> None:
    law, how = BUGS[bug]
    found = tried(bug, laws=(law,), **how)[law]
    assert found.state == "failed", found


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_speculation_that_accepts_too_much_is_caught(dtype: str | None) -> None:
    for bugs, state in ((("9",), "failed"), ((), "passed")):
        with running(*bugs, speculate=True) as drafting, running() as plain:
            case = calibrated(opened(drafting.url, against=plain.url, dtype=dtype))
            found = SERVED.test("speculated", case)
        assert found.state == state, found


@pytest.mark.slow
def test_a_promise_of_batch_invariance_is_held_bit_by_bit() -> None:
    for bugs, state in ((("10",), "failed"), ((), "passed")):
        with running(*bugs, noise="exact") as server:
            case = calibrated(opened(server.url, exact=True))
            found = SERVED.test("concurrent", case)
        assert found.state == state, found


def _silent(seed: int) -> None:
    found = tried(noise=PROFILES[seed % len(PROFILES)], seed=seed, speculate=seed % 5 == 4)
    states = {name: one.state for name, one in found.items()}
    assert states == {**dict.fromkeys(SERVED, "passed"), "speculated": "not applicable"}, found


def test_an_unlikely_sampled_token_does_not_lower_the_bar_of_its_row() -> None:
    """Rows list the likeliest tokens and the sampled one; a token between them and it is absent, not impossible."""
    likely = {i: -1.0 - i / 10 for i in range(20)}
    sampled, greedy = TokenStep(70, -9.0, likely), TokenStep(0, -1.0, {**{i: likely[i] for i in range(19)}, 55: -2.95})
    assert row_gap(sampled, greedy) < 0.06
    assert row_gap(TokenStep(0, -1.0, {**likely, 0: -1.5}), TokenStep(0, -1.0, likely)) == pytest.approx(0.5)
    assert row_gap(TokenStep(0, -1.0, {**likely, 99: -0.5}), TokenStep(0, -1.0, likely)) == pytest.approx(2.4)
    assert row_gap(TokenStep(0, float("nan"), likely), TokenStep(0, -1.0, likely)) == pytest.approx(0.0)
    assert row_gap(TokenStep(0, -1.0, {0: float("nan")}), TokenStep(0, -1.0, likely)) == inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_clean_noisy_server_is_silent(seed: int) -> None:
    _silent(seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_clean_noisy_server_is_silent_in_a_hundred_runs() -> None:
    for seed in range(100, 200):
        _silent(seed)
