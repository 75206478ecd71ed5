"""Fit a scaling law to runs, and read off it the best size and number of tokens for a compute, each with its interval.

L(N, D) = E + A/N^α + B/D^β, by the Huber loss on logarithms from many starts; the intervals are bootstrapped. RUNS is a
directory of runs of `dovetail train`, as a lab writes them, or a .csv with the columns parameters, loss, and tokens or
training_flop. A compute beyond ten times that of the largest run is refused.

    dovetail scaling lab/runs --flops 1e14
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.options import Count, InPath
from dovetail.api.result import Result
from dovetail.base.option import Option
from dovetail.base.units import read_count
from dovetail.views.blocks import TextTable, View

if TYPE_CHECKING:
    from dovetail.experiments.scaling import Estimate, ScalingFit


@dc.dataclass(frozen=True, repr=False)
class ScalingResult(Result):
    """A law with its intervals, and the best run at a compute if one was given."""

    fit: ScalingFit
    best: dict[str, Estimate] | None

    def to_dict(self) -> dict[str, Any]:
        best = None if self.best is None else {name: one._asdict() for name, one in self.best.items()}
        return {**self.fit.to_dict(), "best": best}

    def view(self, width: int) -> View:
        from dovetail.views.scaling import NUMBERS, number_rows

        rows = {**self.fit.numbers(), **(self.best or {})}
        table = TextTable(NUMBERS, number_rows(rows))
        return [f"L(N, D) = E + A/N^alpha + B/D^beta, fitted to {len(self.fit.runs)} runs", table]


def scaling(
    runs: Annotated[str | Path, InPath("A directory of runs, or a .csv of them.", argument=True)],
    *,
    flops: Annotated[float | str | None, Count("The compute of the run to plan, in FLOPs: 1e14.")] = None,
    samples: Annotated[int, Option("Resamplings for the intervals.", low=1, high=10_000)] = 200,
) -> ScalingResult:
    """Fit L(N, D) = E + A/N^α + B/D^β to runs. With `flops`, a compute, the result also has the parameters, tokens and loss of
    the best run."""
    from dovetail.experiments.scaling import fit_law, read_sized_runs

    fit = fit_law(read_sized_runs(runs), samples)
    return ScalingResult(fit, None if flops is None else fit.at(read_count(flops)))
