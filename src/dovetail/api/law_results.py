"""Results of laws: on one model and on sampled specs; each has rows that are shown as they are known."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

from dovetail.api.result import Result
from dovetail.proof.laws.law import Outcome
from dovetail.views.blocks import View, styled
from dovetail.views.laws import law_counts, law_row, suite_view


class LawsResult(Result):
    """What the laws found."""


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

    def view(self, width: int) -> View:
        names = max(map(len, self.statements))
        rows = [law_row(row, self.statements[row.law], names) for row in self.rows]
        return [styled((self.name, "bold")), *rows, self.rest(width)]

    def rest(self, width: int) -> View:
        return law_counts(self.rows)


@dc.dataclass(frozen=True, repr=False)
class SuiteLaws(LawsResult):
    """Every law on every sampled spec."""

    data: dict[str, Any]

    @property
    def failed(self) -> bool:
        return bool(self.data["failed"])

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def view(self, width: int) -> View:
        return list(suite_view(self.data))
