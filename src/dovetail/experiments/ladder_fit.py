"""What a ladder of sizes says: one scaling law per arm, the sizes that it was not fitted to, IsoFLOP curves and the frontier.

A law that was fitted to sizes with one and the same number of tokens per parameter holds on that ray only: its two terms
cannot be separated there, so that it has no frontier. Give `budget` a list for one.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dovetail.base.errors import DovetailError
from dovetail.experiments.arms import Arm
from dovetail.experiments.ladder import Ladder
from dovetail.experiments.results import TrainedRun
from dovetail.experiments.scaling import FLOPS_PER_PARAMETER, Estimate, ScalingFit, SizedRun, fit_law

RAY = 1.5  # the ratio of the most tokens per parameter to the fewest, from which the two terms can be separated
CURVES, POINTS = 4, 24  # IsoFLOP curves of a law, and points of each


class MeasuredRun(Protocol):
    """A run of the report."""

    @property
    def arm(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def run(self) -> TrainedRun: ...


@dc.dataclass(frozen=True)
class Prediction:
    """The loss of a size that was held out, as the fit predicts it and as it was measured, the mean over seeds."""

    arm: str
    parameters: int
    tokens: int
    predicted: Estimate
    measured: float

    @property
    def holds(self) -> bool:
        """Whether the interval has the measured loss."""
        return self.predicted.low <= self.measured <= self.predicted.high

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data."""
        return {**dc.asdict(self), "predicted": self.predicted._asdict(), "holds": self.holds}


@dc.dataclass(frozen=True)
class ArmScaling:
    """The law of an arm over sizes; None, with the reason, where it cannot be fitted."""

    group: str
    fit: ScalingFit | None
    reason: str
    predictions: tuple[Prediction, ...]
    measured: Mapping[float, Sequence[Sequence[tuple[float, float]]]]  # FLOPs -> a curve of (parameters, loss) per seed

    @property
    def has_frontier(self) -> bool:
        """Whether the runs separate parameters from tokens."""
        if self.fit is None:
            return False
        ratios = [run.tokens / run.parameters for run in self.fit.runs]
        return max(ratios) > RAY * min(ratios)

    def isoflops(self) -> dict[float, Sequence[Sequence[tuple[float, float]]]]:
        """FLOPs -> curves of (parameters, loss): as measured where sizes have equal FLOPs, else of the law."""
        if self.measured or self.fit is None or not self.has_frontier:
            return dict(self.measured)
        sizes = [run.parameters for run in self.fit.runs]
        flops = [run.flops for run in self.fit.runs]
        law, grid = self.fit.law, np.geomspace(min(sizes), max(sizes), POINTS)
        return {
            float(c): [[(float(n), law.loss(float(n), float(c) / FLOPS_PER_PARAMETER / float(n))) for n in grid]]
            for c in np.geomspace(min(flops), max(flops), CURVES)
        }

    def to_dict(self) -> dict[str, Any]:
        """The law as plain data."""
        fit = None if self.fit is None else self.fit.to_dict()
        if fit is not None and not self.has_frontier:
            del fit["frontier"]
        held_out = [prediction.to_dict() for prediction in self.predictions]
        return {"fit": fit, "reason": self.reason, "held_out": held_out}


def arm_scaling(ladder: Ladder, arms: Mapping[str, Arm], rows: Sequence[MeasuredRun]) -> dict[str, ArmScaling]:
    """Fit a law to the runs of each arm that verdicts read; `rows` are these."""
    return {group: _scaling(ladder, group, arms, rows) for group in dict.fromkeys(arm.group for arm in arms.values())}


def _scaling(ladder: Ladder, group: str, arms: Mapping[str, Arm], rows: Sequence[MeasuredRun]) -> ArmScaling:
    own = [(arms[row.arm], row) for row in rows if arms[row.arm].group == group]
    try:
        fit, reason = fit_law([_sized(arm, row) for arm, row in own if not arm.held_out]), ""
    except DovetailError as error:
        fit, reason = None, str(error)
    predictions = () if fit is None else tuple(_predictions(fit, own))
    return ArmScaling(group, fit, reason, predictions, _measured(own) if ladder.by == "flops" else {})


def _sized(arm: Arm, row: MeasuredRun) -> SizedRun:
    return SizedRun(float(arm.costs.parameters), float(row.run.report["tokens"]), row.value)


def _predictions(fit: ScalingFit, own: Sequence[tuple[Arm, MeasuredRun]]) -> Iterator[Prediction]:
    for name in dict.fromkeys(arm.name for arm, _ in own if arm.held_out):
        runs = [_sized(arm, row) for arm, row in own if arm.name == name]
        size, tokens, mean = runs[0].parameters, runs[0].tokens, sum(run.loss for run in runs) / len(runs)
        yield Prediction(name, round(size), round(tokens), fit.predict(size, tokens), mean)


def _measured(own: Sequence[tuple[Arm, MeasuredRun]]) -> dict[float, list[list[tuple[float, float]]]]:
    """The losses at each compute by size, a curve for each seed that all its sizes have."""
    cells: dict[float, dict[int, list[float]]] = {}
    for arm, row in own:
        flops = float(f"{FLOPS_PER_PARAMETER * arm.costs.parameters * arm.budget['tokens']:.2g}")
        cells.setdefault(flops, {}).setdefault(arm.costs.parameters, []).append(row.value)
    return {
        flops: [[(float(n), some[n][i]) for n in sorted(some)] for i in range(min(map(len, some.values())))]
        for flops, some in sorted(cells.items())
    }
