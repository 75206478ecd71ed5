"""benchmarks/range.py: a version is tested in its own environment, and one without an environment is not counted as passing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def rows(*flags: str) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "benchmarks/range.py"), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}


@pytest.mark.slow
def test_a_version_without_an_environment_has_no_checks() -> None:
    assert rows("--only", "0.0.0") == {
        "transformers 0.0.0: checks that pass": 0,
        "transformers 0.0.0: checks": 0,
    }


@pytest.mark.slow
def test_the_declared_versions_pass() -> None:
    pytest.importorskip("transformers")
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/range_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])["results"]
    assert len(results) == 6
    assert not any(results.values()), results
