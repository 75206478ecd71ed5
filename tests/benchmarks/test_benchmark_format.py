"""Benchmarks run, and what they print can be read by people and machines; `holds` follows from value, goal and spread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import measure

    return measure


def run(name: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--rounds", "1", "--threads", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [("bare --eager", 3), ("attend", 25), ("load", 6), ("shard", 7), ("look --peers", 5)]
)
def test_json_holds_every_row_with_its_verdict(name: str, rows: int) -> None:
    told = json.loads(run(*name.split(), "--json"))
    assert set(told) == {"rows", "versions"}
    assert {"dovetail", "torch", "python", "threads"} <= set(told["versions"])
    assert len(told["rows"]) == rows
    assert len({row["name"] for row in told["rows"]}) == rows
    for row in told["rows"]:
        assert set(row) == {"name", "value", "goal", "holds", "spread", "rounds"}
        assert isinstance(row["value"], float)
        assert row["holds"] in (True, False, None)
        assert row["goal"] is None or isinstance(row["goal"], str)
        assert row["goal"] is not None or row["holds"] is None


@pytest.mark.slow
def test_generation_is_compared_with_hugging_face_and_a_loop_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling every side takes minutes
    rows = json.loads(run("generate", "--only", "huggingface", "bare", "--json"))["rows"]
    goals = [row["goal"] for row in rows if row["goal"] is not None]
    equal = ["≥ 6", "≥ 1.3", "≥ 6", "≥ 0.97"]  # tokens first, in float32
    assert goals == equal * 2 + ["≥ 1.3", "≥ 0.97"] * 2, "two dtypes, 1 and 8 rows"
    assert len({row["name"] for row in rows}) == len(rows) == 20


def test_sides_that_give_other_tokens_are_not_timed(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import generate
    import torch

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = generate.build(generate.QUICK.spec(), seed=0).eval()
    prompt = torch.randint(0, generate.QUICK.vocab, (2, 8), generator=torch.Generator().manual_seed(0))
    case = generate.Case(generate.QUICK, "f32", model, prompt, threads=1, rounds=1)
    case.check("a side", case.tokens.clone())
    assert (case.rows[-1].value, case.rows[-1].holds) == (6, True)
    other = case.tokens.clone()
    other[1, 2] += 1
    with pytest.raises(generate.OtherTokens):
        case.check("a side", other)
    assert (case.rows[-1].value, case.rows[-1].holds) == (2, False)
    case.tokens = torch.full_like(case.tokens, 5)
    with pytest.raises(SystemExit, match="fewer than 3 tokens differ"):
        case.check("a side", case.tokens.clone())


@pytest.mark.slow
def test_without_json_there_is_a_table() -> None:
    table = run("bare", "--eager")
    assert "train tokens/s" in table
    assert "≥ 0.97" in table


@pytest.mark.parametrize(
    ("low", "high", "value", "spread", "shown"),
    [
        (0.97, None, 1.04, (0.06, 5), "yes"),
        (0.97, None, 0.97, (0.06, 5), "too noisy"),
        (0.97, None, 0.96, (0.009, 5), "NO"),
        (0.97, None, 0.96, (0.02, 5), "too noisy"),
        (0.97, None, 1.50, (0.061, 4), "too few rounds (4)"),
        (1.3, None, 1.3099, (0.106, 5), "too noisy"),
        (None, 1.15, 1.15, None, "yes"),
        (None, 1.15, 1.16, None, "NO"),
        (0.8, 1.2, 0.79, (0.0, 5), "NO"),
        (0.8, 1.2, 1.21, (0.0, 5), "NO"),
        (0.8, 1.2, 1.0, (0.1, 5), "yes"),
        (0.8, 1.2, 1.0, (0.3, 9), "too noisy"),
    ],
)
def test_a4_verdicts(
    measure: Any, low: float | None, high: float | None, value: float, spread: tuple[float, int] | None, shown: str
) -> None:
    row = measure.Row("figure", value, measure.Goal(low, high), None if spread is None else measure.Spread(*spread))
    data = row.data()
    assert row.holds is data["holds"] is {"yes": True, "NO": False}.get(shown)
    assert measure.verdict(data) == shown
    assert measure.Row.read(data) == row, "a stored row is the row again"


def test_a_fact_without_a_goal_claims_nothing(measure: Any) -> None:
    data = measure.Row("figure", 3.0).data()
    assert data == {"name": "figure", "value": 3.0, "goal": None, "holds": None, "spread": None, "rounds": None}
    assert measure.verdict(data) == "no goal"


def test_median_and_interquartile_range(measure: Any) -> None:
    assert measure.middle([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, measure.Spread(2.0, 5))
    assert measure.middle([2.0]) == (2.0, measure.Spread(0.0, 1))


def test_sides_alternate_and_the_first_round_is_left_out(measure: Any) -> None:
    order: list[str] = []
    ratios = measure.taking_turns(lambda: order.append("a"), lambda: order.append("b"), 3, lambda: None)
    assert "".join(order) == "abbaabba"
    assert len(ratios) == 3


def test_sides_that_differ_stop_the_run(measure: Any) -> None:
    import torch

    one = torch.tensor([1.0, 2.0])
    measure.agree("same", one, one + 1e-6, 1e-5)
    with pytest.raises(SystemExit, match="differ by"):
        measure.agree("other", one, one + 1e-3, 1e-5)
    with pytest.raises(SystemExit, match="differ by"):
        measure.agree("not a number", one * float("nan"), one, 1e-5)


def test_alive_counts_what_is_alive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import torch
    from memory import Alive

    before = torch.zeros(100)
    with Alive(before) as alive:
        kept = before + 1  # 400 bytes that stay
        for _ in range(5):
            (kept * 2).view(10, 10).sum()  # 400 bytes and 4, freed each time; a view is no storage of its own
    assert alive.peak == 400 + 400 + 4
    assert alive.now == 400
