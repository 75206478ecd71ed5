"""Each recipe in its quick form, in an empty folder: its goals hold, and each fault moves its figure past the goal."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.views.recipe import holds

RECIPES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.py")) if path.stem != "run"}


def recipe(name: str) -> dt.Recipe:
    """What the file declares; nothing of it is run."""
    return runpy.run_path(str(RECIPES[name]))["RECIPE"]


def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPES[name]), "--quick", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)


def figures(name: str, folder: Path) -> dict[str, list]:
    return json.loads((folder / name / "figures.json").read_text())["0"]["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_goal_holds(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "every goal holds" in done.stdout
    assert (tmp_path / name / f"{name}.png").stat().st_size > 5000
    assert any(goal[1:] != [None, None] for goal in figures(name, tmp_path).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_fault_is_seen(name: str, tmp_path: Path) -> None:
    for fault, figure in recipe(name).faults.items():
        done = run(name, tmp_path, "--fault", fault)
        assert done.returncode == 1, done.stdout + done.stderr[-2000:]
        value, low, high = figures(name, tmp_path)[figure]
        assert not holds((value, low, high)), f"{fault}: {figure} is {value}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_file_on_the_public_door(name: str) -> None:
    lines = [line.strip() for line in RECIPES[name].read_text(encoding="utf-8").splitlines()]
    assert "import dovetail as dt" in lines
    assert not [line for line in lines if line.startswith(("from dovetail", "import dovetail."))]
    assert len(lines) < 250
    assert recipe(name).faults, "give the mistake that moves a figure past its goal"


def test_a_figure_that_is_not_finite_is_outside_of_its_goal() -> None:
    """A fault that made a loss NaN counted as far inside: `min(inf, nan)` is inf."""
    margin = runpy.run_path(str(RECIPES["gan"].with_name("run.py")))["margin"]
    for value in (float("nan"), float("inf"), float("-inf")):
        for low, high in ((None, 0.05), (0.9, None), (0.0, 1.0)):
            assert margin((value, low, high)) < 0
    assert margin((0.02, None, 0.05)) == pytest.approx(0.03)
    assert margin((0.1, 0.9, None)) < 0
