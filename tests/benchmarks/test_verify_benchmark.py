"""The benchmark of seeded bugs runs, finds one of every kind, and raises no alarm on clean pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_one_bug_of_every_kind(tmp_path: Path) -> None:
    table = tmp_path / "cases.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "verify.py"),
        "--quick",
        "--json",
        "--threads",
        "1",
        "--table",
        str(table),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["kinds of bugs"]["value"] >= 30
    assert rows["misses"]["value"] == rows["false alarms"]["value"] == 0
    assert all(rows[name]["holds"] for name in ("first bad layer named right", "cause named right"))
    cases = json.loads(table.read_text())
    assert sum(case["kind"] != "clean" for case in cases) == rows["corrupted models"]["value"]
    assert table.with_suffix(".md").read_text().startswith("| bug |")
