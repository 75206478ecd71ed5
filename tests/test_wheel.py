"""The wheel, as a user meets it: built, installed in a fresh environment, and every verb run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dovetail.cli import VERBS

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
SMALL = ["--set=width=28", "--set=vocab=290", "--set=layers.*.mixer.heads=2", "--set=layers.*.mixer.kv_heads=1"]
MODEL = ["--batch=4", "--length=16", "--sample=0", "--steps=3", "-o", "model"]

# verb -> arguments and the exit code; in this order, since later ones read what earlier ones wrote
RUNS: dict[str, tuple[list[str], int]] = {
    "doctor": ([], 0),
    "completion": (["bash"], 0),
    "parts": (["--group", "norm"], 0),
    "port": (["--json"], 0),
    "show": (["llama-tiny"], 0),
    "diff": (["llama-tiny", "llama-tiny", "--swap", "position=alibi"], 0),
    "emit": (["llama-tiny", "-o", "llama.py"], 0),
    "train": (["llama-tiny", "--text", "notes.txt", *SMALL, *MODEL], 0),
    "data build": (["notes.txt", "--lines", "--tokenizer", "model", "-o", "tokens"], 0),
    "data show": (["tokens", "--verify"], 0),
    "generate": (["model", "It was", "--max-tokens", "3"], 0),
    "chat": (["model"], 4),  # it has no chat template, and says so
    "serve": (["model"], 2),  # needs the extra `serve`, and says so
    "export": (["model", "-o", "exported"], 0),
    "import": (["exported", "-o", "imported"], 0),
    "verify": (["model", "imported"], 0),
    "record": (["transformers", "exported", "-o", "dump", "--steps", "1"], 4),  # needs transformers, and says so
    "graft": (["model", "--set=layers.*.mixer.position=alibi", "-o", "grafted"], 0),
    "laws": (["llama-tiny", "--only", "causal", *SMALL], 0),
    "tiny": (["model", "-o", "tiny"], 0),
    "map": (["model", "It was", "-o", "map.png"], 4),  # needs the extra `look`, and says so
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with torch and the wheel, nothing else."""
    home = tmp_path_factory.mktemp("wheel")
    _run(home, sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(home))
    venv.create(home / "env", with_pip=True)
    python = str(home / "env" / "bin" / "python")
    (wheel,) = home.glob("dovetail-*.whl")
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
    (tmp_path / "notes.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    env = {"PATH": f"{environment}:{os.environ['PATH']}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for verb, (args, code) in RUNS.items():
        command = [str(environment / "dovetail"), *verb.split(), *args]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == code, f"{verb}: {done.stderr[-2000:]}{done.stdout[-500:]}"
        assert "Traceback" not in done.stderr
    assert "dovetail[look]" in done.stderr
