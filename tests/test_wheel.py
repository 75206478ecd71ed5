"""The wheel, as a user meets it: built, installed in a fresh environment, and every verb run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dovetail.cli import VERBS
from verbs import CODES, RUNS, STDIN, write_inputs

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
# exit codes of verbs that need what the wheel does not bring: transformers, the extras `serve` and `look`; each says so
MISSING = {"record": (4, "dovetail-lm[hf]"), "serve": (2, "dovetail-lm[serve]"), "map": (4, "dovetail-lm[look]")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with torch and the wheel, nothing else."""
    home = tmp_path_factory.mktemp("wheel")
    _run(home, sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(home))
    venv.create(home / "env", with_pip=True)
    python = str(home / "env" / "bin" / "python")
    (wheel,) = home.glob("dovetail_lm-*.whl")
    _run(home, python, "-m", "pip", "install", "-q", TORCH)
    _run(home, python, "-m", "pip", "install", "-q", str(wheel))
    return home / "env" / "bin"


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_verb_runs_from_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    assert set(RUNS) == set(VERBS), "every verb is run"
    write_inputs(tmp_path)
    env = {"PATH": f"{environment}:{os.environ['PATH']}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for verb, args in RUNS.items():
        code, message = MISSING.get(verb, (CODES.get(verb, 0), ""))
        command = [str(environment / "dovetail"), *verb.split(), *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, input=STDIN, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == code, f"{verb}: {done.stderr[-2000:]}{done.stdout[-500:]}"
        assert "Traceback" not in done.stderr
        assert message in done.stderr
