"""The verdict of a comparison: its passes, the first one that fails, what was tested and what was not."""

from __future__ import annotations

import dataclasses as dc
from math import isfinite
from typing import Any

from dovetail.proof.compare.cause import Cause, WeightDifference
from dovetail.proof.compare.comparison import Comparison, Status, Tap, short
from dovetail.proof.compare.match import layer_of
from dovetail.proof.compare.prompt import Prompt

FAILED: tuple[Status, ...] = ("structural", "non-finite")


@dc.dataclass(frozen=True)
class Pass:
    """One comparison on one prompt."""

    name: str
    prompt: Prompt
    comparison: Comparison
    across: bool = True  # False: a side against itself, or two decoded runs; no cause is searched


@dc.dataclass
class Verdict:
    """The result of a comparison of two sides."""

    a: str
    b: str
    passes: list[Pass] = dc.field(default_factory=list)
    cause: Cause | None = None
    searched: bool = False  # whether a cause was searched
    weights: list[WeightDifference] = dc.field(default_factory=list)  # tensors whose values differ
    nonfinite: list[str] = dc.field(default_factory=list)  # weights that hold NaN or infinity: `A: layers.0.mixer.q.weight`
    tested: list[str] = dc.field(default_factory=list)
    not_tested: list[str] = dc.field(default_factory=list)
    notes: list[str] = dc.field(default_factory=list)
    recorded: str = ""  # the engine that recorded B, where B is a dump

    @property
    def deciding(self) -> Pass:
        """The first pass that fails, or that rounds too much; the first one where none does."""
        failed = [one for one in self.passes if one.comparison.status in FAILED]
        rounding = [one for one in self.passes if one.comparison.status == "rounding"]
        return next(iter([*failed, *rounding, *self.passes]))

    @property
    def comparison(self) -> Comparison:
        """The comparison that decides the verdict."""
        return self.deciding.comparison

    @property
    def status(self) -> Status:
        """The verdict in one word."""
        status = self.comparison.status
        return "non-finite" if self.nonfinite and status not in FAILED else status

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return self.status in FAILED

    @property
    def first(self) -> Tap | None:
        """The tap that decides the verdict."""
        return self.comparison.first or self.comparison.first_rounding

    @property
    def layer(self) -> str | None:
        """The layer of that tap, `embed` or `head`."""
        return None if self.first is None else "embed" if self.first.address == "layers.0.in" else layer_of(self.first.address)

    def coverage(self) -> tuple[str, str]:
        """One line with what was tested, one with what was not."""
        dtypes = " and ".join(dict.fromkeys(short(dtype) for dtype in (*self.comparison.dtypes,)))
        return f"float64 and {dtypes}; {'; '.join(self.tested)}", "; ".join(self.not_tested)

    def data(self) -> dict[str, Any]:
        """The verdict as JSON data; a number that is not finite is null."""
        tested, not_tested = self.coverage()
        return {
            "a": self.a,
            "b": self.b,
            "dtypes": [short(dtype) for dtype in self.comparison.dtypes],
            "prompts": self.deciding.prompt.batch,
            "tokens": self.deciding.prompt.n,
            "verdict": self.status,
            "pass": self.deciding.name,
            "first": None if self.first is None else self.first.address,
            "layer": self.layer,
            "cause": None if self.cause is None else dc.asdict(self.cause),
            "weights": [finite(one._asdict()) for one in self.weights],
            "non_finite_weights": self.nonfinite,
            "taps": [{**finite(dc.asdict(tap)), "state": tap.status} for tap in self.comparison.taps],
            "not_compared": self.comparison.missing,
            "passes": {one.name: one.comparison.status for one in self.passes},
            "tested": tested,
            "not_tested": not_tested,
            "notes": self.notes,
            "engine": self.recorded or None,
        }


def finite(data: dict[str, Any]) -> dict[str, Any]:
    """The same data with null for every number that JSON cannot hold."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in data.items()}
