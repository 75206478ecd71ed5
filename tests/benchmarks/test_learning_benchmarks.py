"""stream.py and learn.py run and report their rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


def run(name: str, *flags: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--threads", "1", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_short_stream_has_constant_memory_and_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = {row["name"]: row for row in run("stream", "--figure", str(tmp_path / "stream.png"))["rows"]}
    assert len(rows) == 9
    assert rows["bytes of the cache, end ÷ beginning"]["holds"] is True
    assert rows["most bytes alive in a step, end ÷ once the cache is full"]["holds"] is True
    assert (tmp_path / "stream.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("recall", 12), ("lengths", 10), ("reach", 10), ("wires", 6)])
def test_an_experiment_leaves_figures_and_a_picture(tmp_path: Path, name: str, rows: int) -> None:
    pytest.importorskip("matplotlib")
    told = run("learn", "--only", name, "--out", str(tmp_path))
    assert len(told["rows"]) == rows
    assert json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    again = run("learn", "--only", name, "--out", str(tmp_path), "--draw")
    assert again["rows"] == told["rows"]


@pytest.mark.slow
def test_the_text_of_python_is_english_and_always_the_same(bench: Any) -> None:
    prose = bench("prose")
    text = prose.python_text(most=30_000)
    assert text == prose.python_text(most=30_000)
    assert len(text) == 30_000
    assert text != prose.python_text(seed=1, most=30_000)
    assert text.count(" the ") > 100


def test_an_interval_is_students(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    learn = bench("learn")
    assert learn.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.9629, abs=1e-3)  # 2.776 · 1.5811 / √5
    assert learn.interval([2.0, 2.0]) == 0.0
