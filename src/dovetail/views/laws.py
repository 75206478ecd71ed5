"""The results of laws: a row per law of a model, a row per sampled spec, and the table of all laws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.proof.laws.law import Outcome
from dovetail.views.blocks import StyledText, TextTable, styled

MOST_FAILURES = 10  # that a terminal shows
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not applicable": ("–", "dim")}
COLUMNS = ("passed", "excepted", "failed", "not applicable", "seconds")


def law_row(outcome: Outcome, statement: str, width: int) -> TextTable:
    """The result of one law on a model; `width` is that of the longest name of a law."""
    mark = MARKS.get(outcome.state, ("~", "yellow"))
    detail = [(f"\n{outcome.detail}", "dim")] if outcome.detail else []
    return _row(mark, outcome.law, width, styled(statement, *detail))


def spec_row(number: int, outcomes: Sequence[Outcome]) -> TextTable:
    """The results of all laws on one sampled spec: how many passed, and the laws that fail."""
    failures = [f"\n{outcome.law}: {outcome.detail}" for outcome in outcomes if outcome.state == "failed"]
    seconds = sum(outcome.seconds for outcome in outcomes)
    text = f"{law_counts(outcomes)}; {seconds:.1f} s{''.join(failures)}"
    return _row(MARKS["failed" if failures else "passed"], f"spec {number}", 8, styled(text))


def law_counts(outcomes: Sequence[Outcome]) -> str:
    """How many outcomes there are of each state."""
    return ", ".join(f"{count} {state}" for state, count in Counter(outcome.state for outcome in outcomes).items())


def _row(mark: tuple[str, str], name: str, width: int, text: StyledText) -> TextTable:
    cells = styled((f" {mark[0]}", mark[1])), name, text
    return TextTable(("mark", "name", "text"), [cells], header=False, widths=(2, width))


def suite_view(data: Mapping[str, Any]) -> Iterator[str | StyledText | TextTable]:
    """Every law on every sampled spec: a row per law, the coverage, and the first failures."""
    yield f"{data['cells']} cells: {data['specs']} specs × {data['laws']} laws, {data['parts']} parts"
    yield TextTable(("law", *COLUMNS), [_law_cells(name, row) for name, row in data["by_law"].items()], right=COLUMNS)
    if "pairs_covered" in data:
        covered, excepted = f"{data['pairs_covered']:.1%}", f"{data['excepted_share']:.1%}"
        yield f"pairs covered: {covered}   excepted: {excepted}   {data['seconds']:.0f} s"
    for name, times in data["over_budget"].items():
        yield styled((f"{name}: {times['seconds_per_spec']} s per spec, the budget is {times['budget']} s", "yellow"))
    for failure in data["failures"][:MOST_FAILURES]:
        yield styled((failure["law"], "red"), f": {failure['detail']}\n", (failure["spec"], "dim"))


def _law_cells(name: str, row: Mapping[str, Any]) -> list[str | StyledText]:
    passed = row["cells"] - row["failed"] - row["excepted"]
    counts = passed, row["excepted"], row["failed"], row["not_applicable"], f"{row['seconds']:.1f}"
    return [styled((name, "red" if row["failed"] else "green")), *map(str, counts)]
