"""The attack on the command line, a small part of it; and every kind of fault is seen when it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLANTED: dict[str, str] = {
    "tracebacks": "raise KeyError('x')",
    "over 1 GB": "x = bytearray(1500 * 2**20); x[::4096] = b'1' * len(x[::4096])",
    "escapes": "print('\\x1b[2K')",
    "exit 0 on failure": "pass",
    "code run": "open('CANARY', 'w').close()",
}
PROBE = """
import sys, shutil
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import hostile
from hostile_inputs import Input, fixtures
from dovetail.cli.command import Command

def run(self, given):
    exec({code!r})
    return 0

Command.run = run
fixtures(Path("fixtures"))
item = Input("planted", ("show", "spec.yaml"), must_fail={must_fail})
print(*hostile.faults(item, hostile.run(item, Path("fixtures"))), sep="\\n")
"""


@pytest.mark.slow
def test_a_part_of_the_attack_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "hostile.py"), "--quick", "--json", "--list", str(tmp_path / "faults")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["inputs"]["value"] >= 60
    assert not [row for row in rows.values() if row["holds"] is False], (tmp_path / "faults").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    text = PROBE.format(benchmarks=str(BENCHMARKS), code=PLANTED[fault], must_fail=fault == "exit 0 on failure")
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [fault]


@pytest.mark.slow
def test_startup_has_a_row_per_command() -> None:
    command = [sys.executable, str(BENCHMARKS / "startup.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    rows = json.loads(done.stdout)["rows"]
    assert [row["goal"] for row in rows] == ["≤ 1.5", *["≤ 0.5"] * 4, *["≤ 1.03"] * 5]


@pytest.mark.slow
def test_c10_the_attack_reaches_every_verb() -> None:
    text = f"""
import json, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import hostile, hostile_files, hostile_inputs
from dovetail.cli import VERBS
print(json.dumps([sorted(VERBS), sorted(hostile_inputs.BASE), sorted(hostile.SAVES)]))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    verbs, attacked, killed = json.loads(done.stdout)
    assert verbs == attacked
    assert len(killed) >= 8
