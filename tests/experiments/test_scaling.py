"""Fits of scaling laws: the corrected fit of Chinchilla's runs, planted laws, intervals, and what is refused.

tests/data/chinchilla.csv: parameters, training FLOP and loss of 245 runs, read off figure 4 of Hoffmann et al. 2022 by the
authors of arXiv 2404.10102 (Besiroglu et al. 2024). Their fit leaves out five runs. With the five of the fewest tokens (of the
smallest ratio of FLOP to parameters) left out, this fit agrees with theirs; with the five of the most tokens it does not.
"""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.base.errors import DovetailError, FileError
from dovetail.experiments.scaling import (
    BeyondReach,
    ScalingFit,
    ScalingLaw,
    SizedRun,
    _objective,
    fit_law,
    read_sized_runs,
)

CHINCHILLA = Path(__file__).parents[1] / "data" / "chinchilla.csv"
PLANTED = ScalingLaw(1.8, 400.0, 1500.0, 0.34, 0.37)


def planted(noise: float = 0.0, seed: int = 0) -> list[SizedRun]:
    draw = np.random.default_rng(seed)
    grid = [(n, d) for n in np.geomspace(1e7, 1e9, 6) for d in np.geomspace(2e8, 2e10, 6)]
    return [SizedRun(n, d, PLANTED.loss(n, d) * float(np.exp(noise * draw.standard_normal()))) for n, d in grid]


@pytest.fixture(scope="module")
def fit() -> ScalingFit:
    return fit_law(planted(0.005), samples=60)


def test_the_corrected_fit_of_chinchilla() -> None:
    runs = sorted(read_sized_runs(CHINCHILLA), key=lambda run: run.tokens)
    assert len(runs) == 245
    found = fit_law(runs[5:], samples=20).law
    assert pytest.approx(1.8172, abs=0.02) == found.E
    assert (found.alpha, found.beta) == (pytest.approx(0.3478, abs=0.02), pytest.approx(0.3658, abs=0.02))
    assert pytest.approx(482.01, rel=0.05) == found.A
    assert pytest.approx(2085.43, rel=0.05) == found.B
    published = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28)
    errors = [
        np.mean([abs(np.log(law.loss(run.parameters, run.tokens) / run.loss)) for run in runs[5:]])
        for law in (found, published)
    ]
    assert errors[0] < 0.8 * errors[1]
    size, tokens = found.optimal(5.76e23)  # Chinchilla's compute: about 20 tokens per parameter
    assert 10 < tokens / size < 40


def test_a_planted_law_is_found() -> None:
    found = fit_law(planted(), samples=1).law
    assert found == pytest.approx(PLANTED, rel=1e-3)


def test_outliers_do_not_move_it() -> None:
    runs = planted(0.001)
    runs[7] = runs[7]._replace(loss=3 * runs[7].loss)
    assert fit_law(runs, samples=1).law.alpha == pytest.approx(PLANTED.alpha, abs=0.02)


def test_the_gradient_is_that_of_finite_differences() -> None:
    data = np.log(np.array(planted(0.02)))
    x = np.array([6.1, 7.2, 0.5, 0.33, 0.36])
    _, gradient = _objective(x, data)
    for i, step in enumerate(np.eye(5) * 1e-6):
        difference = (_objective(x + step, data)[0] - _objective(x - step, data)[0]) / 2e-6
        assert gradient[i] == pytest.approx(difference, rel=1e-3)


def test_intervals_cover_the_planted_law(fit: ScalingFit) -> None:
    inside = [one.low <= value <= one.high for one, value in zip(fit.numbers().values(), PLANTED, strict=True)]
    assert sum(inside) >= 4
    best = fit.at(1e20)
    assert best["loss"].low <= PLANTED.loss(*PLANTED.optimal(1e20)) <= best["loss"].high
    assert best["parameters"].value * best["tokens"].value * 6 == pytest.approx(1e20)
    assert best["loss"].low < best["loss"].value < best["loss"].high


def test_a_run_that_was_held_out_is_predicted_with_its_noise(fit: ScalingFit) -> None:
    draw = np.random.default_rng(9)
    inside = 0
    for _ in range(40):
        loss = PLANTED.loss(2e9, 4e10) * float(np.exp(0.005 * draw.standard_normal()))
        at = fit.predict(2e9, 4e10)
        inside += at.low <= loss <= at.high
    assert inside >= 34
    law = fit.estimate(lambda one: one.loss(2e9, 4e10))
    at = fit.predict(2e9, 4e10)
    assert at.high - at.low > law.high - law.low


def test_the_optimum_has_the_lowest_loss_of_its_compute() -> None:
    size, tokens = PLANTED.optimal(1e20)
    assert all(PLANTED.loss(size, tokens) < PLANTED.loss(size * f, tokens / f) for f in (0.5, 0.9, 1.1, 2.0))


def test_beyond_ten_times_the_largest_run_there_is_no_answer(fit: ScalingFit) -> None:
    largest = max(run.flops for run in fit.runs)
    fit.at(9.9 * largest)
    with pytest.raises(BeyondReach, match=r"more than 10 times the 1\.2e\+20 of the largest run"):
        fit.at(10.1 * largest)
    with pytest.raises(BeyondReach):
        fit.predict(1e10, 1e12)
    assert fit.frontier()[-1]["flops"] == pytest.approx(10 * largest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size,loss\n1,2\n", "its columns are size, loss; give parameters, loss, and tokens or training_flop"),
        ("parameters,tokens,loss\n1,2,x\n", "line 2: is not three numbers"),
        ("parameters,tokens,loss\n1,2,-3\n", "line 2: holds a number that is not above 0"),
        ("parameters,training_flop,loss\n0,2,3\n", "line 2: is not three numbers"),
    ],
)
def test_tables_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=message):
        read_sized_runs(tmp_path / "runs.csv")


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(FileError, match="5 runs cannot be fitted"):
        fit_law(planted()[:5])
    with pytest.raises(FileError, match="with 3 sizes"):
        fit_law([run for run in planted() if run.parameters < 3e7])


def test_scipy_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DovetailError, match=r"a fit needs scipy: pip install .*\[lab\]"):
        fit_law(planted(), samples=1)
