"""Results of laws: on one model and on sampled specs; each has rows that are shown as they are known."""

from __future__ import annotations

import dataclasses as dc
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.api.result import Result
from dovetail.proof.laws.law import Outcome
from dovetail.views.console import plain_table

MOST_FAILURES = 10  # that a terminal shows
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not applicable": ("–", "dim")}


class LawsResult(Result):
    """What the laws found."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a law fails; the exit code is then 1."""

    @abstractmethod
    def summary(self) -> RenderableType:
        """What is printed after the results, each of which was printed when it was known."""


@dc.dataclass(frozen=True, repr=False)
class ModelLaws(LawsResult):
    """The laws on one model."""

    name: str
    rows: tuple[Outcome, ...]
    statements: Mapping[str, str]  # law -> what it states
    about: Mapping[str, Any]  # further fields of `to_dict`

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The rows of the laws that fail."""
        return tuple(row for row in self.rows if row.state == "failed")

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def to_dict(self) -> dict[str, Any]:
        return {**self.about, "failed": len(self.failures), "laws": [dc.asdict(row) for row in self.rows]}

    def view(self, width: int) -> RenderableType:
        return Group(Text(self.name, "bold"), *(law_row(row, self.statements) for row in self.rows))

    def summary(self) -> RenderableType:
        states = Counter(row.state for row in self.rows)
        return Text(", ".join(f"{count} {state}" for state, count in states.items()))


def law_row(row: Outcome, statements: Mapping[str, str]) -> RenderableType:
    """The result of one law on a model."""
    mark, style = MARKS.get(row.state, ("~", "yellow"))
    statement = Text(statements[row.law])
    if row.detail:
        statement.append(f"\n{row.detail}", "dim")
    return _row((f" {mark}", style), 2, row.law, max(map(len, statements)), statement)


def _row(mark: tuple[str, str], first: int, name: str, second: int, text: Text) -> RenderableType:
    """One row of a table whose rows are printed one at a time, so that its first columns have fixed widths."""
    table = plain_table("mark", "name", "text")
    table.columns[0].min_width, table.columns[1].min_width = first, second
    table.add_row(Text(*mark), Text(name), text)
    return table


@dc.dataclass(frozen=True, repr=False)
class SuiteLaws(LawsResult):
    """Every law on every sampled spec."""

    data: dict[str, Any]

    @property
    def failed(self) -> bool:
        return bool(self.data["failed"])

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def view(self, width: int) -> RenderableType:
        return self.summary()

    def summary(self) -> RenderableType:
        data = self.data
        title = f"{data['cells']} cells: {data['specs']} specs × {data['laws']} laws, {data['parts']} parts"
        columns = ("passed", "excepted", "failed", "not applicable", "seconds")
        table = Table(title=title)
        table.add_column("law")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in data["by_law"].items():
            passed = row["cells"] - row["failed"] - row["excepted"]
            cells = (passed, row["excepted"], row["failed"], row["not_applicable"], f"{row['seconds']:.1f}")
            table.add_row(Text(name, "red" if row["failed"] else "green"), *map(str, cells))
        lines: list[RenderableType] = [table]
        if "pairs_covered" in data:
            covered, excepted = f"{data['pairs_covered']:.1%}", f"{data['excepted_share']:.1%}"
            lines.append(Text(f"pairs covered: {covered}   excepted: {excepted}   {data['seconds']:.0f} s"))
        for name, times in data["over_budget"].items():
            lines.append(Text(f"{name}: {times['seconds_per_spec']} s per spec, the budget is {times['budget']} s", "yellow"))
        for failure in data["failures"][:MOST_FAILURES]:
            lines += [Text.assemble((failure["law"], "red"), f": {failure['detail']}"), Text(failure["spec"], "dim")]
        return Group(*lines)


def spec_row(number: int, outcomes: Sequence[Outcome]) -> RenderableType:
    """The results of all laws on one sampled spec: how many passed, and the laws that fail."""
    states = Counter(outcome.state for outcome in outcomes)
    failures = [f"\n{outcome.law}: {outcome.detail}" for outcome in outcomes if outcome.state == "failed"]
    mark = MARKS["failed" if failures else "passed"]
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    seconds = sum(outcome.seconds for outcome in outcomes)
    return _row((f" {mark[0]}", mark[1]), 2, f"spec {number}", 8, Text(f"{counts}; {seconds:.1f} s{''.join(failures)}"))
