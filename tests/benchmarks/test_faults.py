"""Faults of training at a small size; and a row fails where its guarantee is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WITH_A_BUG = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from faults import ROWS
import dovetail.training.checkpoint as checkpoint
{bug}
work, sizes = ROWS[sys.argv[2]]
with tempfile.TemporaryDirectory() as place:
    print(json.dumps([row.holds for row in work(Path(place), **sizes)]))
"""


def run(*rows: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "--quick", "--json", "--only", *rows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_fast_rows_hold_and_have_the_format_of_a_benchmark() -> None:
    found = run("C4", "C10", "C11", "D2")
    assert set(found) == {"rows", "versions"}
    assert all(set(row) == {"name", "value", "goal", "holds", "spread", "rounds"} for row in found["rows"])
    for name in ("C4", "C10", "C11", "D2"):
        assert any(row["holds"] for row in found["rows"] if row["name"].startswith(f"{name} ")), name


@pytest.mark.slow
@pytest.mark.parametrize("row", ["C1", "C2", "C3", "C5", "C6", "C7", "C8", "C9", "C12", "C13", "C14", "C15", "resume"])
def test_a_fault_does_no_harm(row: str) -> None:
    run(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "bug"),
    [
        ("C1", "checkpoint.write_manifest = lambda place, manifest: None"),
        ("C3", "checkpoint.verify = lambda path, *_: checkpoint.read_manifest(path)"),
        ("C4", "checkpoint.FileError = OSError"),
        ("C13", "__import__('dovetail.training.ranks', fromlist=['']).FACTOR = 1e9"),
        ("C14", "checkpoint.read_chunks = lambda *_: None"),
        ("C11", "checkpoint.NAME = __import__('re').compile(r'step-(0000000[1-4])')"),
    ],
)
def test_a_row_sees_a_bug(row: str, bug: str) -> None:
    command = [sys.executable, "-c", WITH_A_BUG.format(bug=bug), str(BENCHMARKS), row]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode != 0 or False in json.loads(done.stdout)
