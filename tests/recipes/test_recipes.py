"""Each recipe in its quick form, in an empty folder: its goals hold, and its fault moves a figure past the goal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = {"induction": ("shuffled", "accuracy, two layers"), "features": ("dense", "fraction of features found")}


def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"recipes/{name}.py"), "--quick", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_goal_holds(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "every goal holds" in done.stdout
    assert (tmp_path / name / f"{name}.png").stat().st_size > 5000
    assert json.loads((tmp_path / name / "figures.json").read_text())["0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_seen(name: str, tmp_path: Path) -> None:
    fault, figure = FAULTS[name]
    done = run(name, tmp_path, "--fault", fault)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert any(line.strip().startswith(f"FAILS  {figure}") for line in done.stdout.splitlines()), done.stdout


def test_a_recipe_uses_the_public_door_only() -> None:
    for path in (ROOT / "recipes").glob("*.py"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        assert "import dovetail as dt" in lines, path
        assert not [line for line in lines if line.startswith(("from dovetail", "import dovetail."))], path
        assert len(lines) < 250, path
