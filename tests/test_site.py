"""The site: it builds without a warning or a broken link, its search finds words of the field, and results are in sections."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def row(name: str, holds: bool | None, goal: str | None = "≥ 1", rounds: int | None = None) -> dict[str, Any]:
    return {"name": name, "value": 1.5, "goal": goal, "holds": holds, "spread": rounds and 0.7, "rounds": rounds}


def test_results_are_told_apart() -> None:
    from figures import Standing
    from results_page import Measured, page

    rows = [row("a", True), row("b", False), row("c", None, rounds=5), row("d", None, rounds=3), row("e", None, goal=None)]
    fresh = Measured(Standing("dist", "fresh", "abc1234", 5, None), rows, "")
    older = Measured(Standing("serve", "stale", "def5678", 5, None), [row("f", True)], "2 of 9 files have changed since")
    text = "\n".join(page([fresh, older]))
    assert text.startswith("2 figures: 2 goals hold, 1 fail, 2 are undecided.")
    holds, fails, undecided, present, folded = (text.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in SECTIONS)
    assert "| `dist` | 1 of 4 | abc1234 |" in holds
    assert "def5678" in holds
    assert "| `dist` | b | 1.5 | ≥ 1 | abc1234 |" in fails
    assert "| `dist` | c | 1.5 ± 0.7 | ≥ 1 | too noisy | abc1234 |" in undecided
    assert "too few rounds (3)" in undecided
    assert "| e | 1.5 | no goal | no goal |" in present
    assert "serve" not in present
    assert "<details><summary><code>serve</code>: 2 of 9 files have changed since</summary>" in folded


SECTIONS = ("Holds", "Fails", "Undecided", "Figures of the present sources", "Older figures")


def test_a_query_needs_all_its_words() -> None:
    from search_terms import pages

    index = {"terms": {"cach": [1, 2], "kv": 2}, "titleterms": {"kv": [5]}}
    assert pages(index, ["kv", "cach"]) == {2}
    assert pages(index, ["kv", "unknown"]) == set()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_builds_and_is_searched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    from search_terms import QUERIES, missing

    assert len(QUERIES) >= 40
    assert missing(tmp_path) == []
