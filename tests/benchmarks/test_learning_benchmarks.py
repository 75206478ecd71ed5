"""stream.py and learn.py run and tell their rows; the tasks ask what they say they ask."""

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


def test_selective_copying_asks_for_the_symbols_in_order(bench: Any) -> None:
    tasks = bench("tasks")
    batch = tasks.selective_copying(3, 50, length=32, vocab=16, symbols=6)
    assert batch.tokens.shape == batch.labels.shape == (50, 32)
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        symbols = tokens[:26][tokens[:26] != tasks.NOISE]
        assert symbols.tolist() == labels[26:].tolist()
        assert (tokens[26:] == tasks.ASK).all()
        assert (labels[:26] == -100).all()
        assert set(symbols.tolist()) <= set(range(2, 16))
    assert len({tuple((row[:26] != 0).nonzero().flatten().tolist()) for row in batch.tokens}) > 40  # places differ


def test_induction_labels_are_the_tokens_after_the_mark(bench: Any) -> None:
    tasks = bench("tasks")
    batch = tasks.induction(3, 50)
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        first, last = (tokens == tasks.MARK).nonzero().flatten().tolist()
        assert last == 31
        assert labels[-1] == tokens[first + 1] != tasks.MARK
        assert (labels[:-1] == -100).all()


def test_a_draw_is_a_function_of_its_seed(bench: Any) -> None:
    for task in bench("tasks").TASKS.values():
        assert (task(5, 4).tokens == task(5, 4).tokens).all()
        assert (task(5, 4).tokens != task(6, 4).tokens).any()


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
