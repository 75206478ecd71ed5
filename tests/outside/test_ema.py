"""The mixer of docs/parts.md: from a file in an empty folder it is held to every law, trained, and generates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SMALL = ["--set=width=28", "--set=vocab=290", "--set=layers.*.mixer.inner=10", "--set=layers.*.ffn.hidden=44"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ema.py", "ema.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "notes.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    return tmp_path


def run(folder: Path, *args: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return done.stdout


@pytest.mark.slow
def test_it_is_shown_trained_and_generates(folder: Path) -> None:
    assert "ema" in run(folder, "show", "ema.yaml", "--load", "ema.py")
    steps = ["--steps=20", "--batch=4", "--length=24", "--sample=0", "-o", "trained"]
    run(folder, "train", "ema.yaml", "--load", "ema.py", "--text", "notes.txt", *steps, *SMALL)
    out = run(folder, "generate", "trained", "It was", "--load", "ema.py", "--max-tokens", "5", "--json")
    assert len(json.loads(out)["tokens"]) == 5


@pytest.mark.slow
def test_it_is_tested_by_every_law(folder: Path) -> None:
    report = json.loads(run(folder, "laws", "ema.yaml", "--load", "ema.py", "--json", *SMALL))
    assert report["failed"] == 0
    states = {row["law"]: row["state"] for row in report["laws"]}
    assert sum(state != "not applicable" for state in states.values()) >= 15
