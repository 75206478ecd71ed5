"""What a lab found, as data: verdicts, arms with their costs, every run, the sweeps, and what is needed to repeat it."""

from __future__ import annotations

import dataclasses as dc
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.experiments.arms import Arm
from dovetail.experiments.confidence import PairedInterval
from dovetail.experiments.design import LabDesign
from dovetail.experiments.lab import LabState
from dovetail.experiments.lab_runs import find_run
from dovetail.experiments.ladder_fit import ArmScaling, arm_scaling
from dovetail.experiments.outside_metric import over_items
from dovetail.experiments.results import TrainedRun, sources_digest, versions
from dovetail.experiments.verdict import ArmVerdict
from dovetail.spec.part import Part
from dovetail.training.record import read_initial


@dc.dataclass(frozen=True)
class RunRow:
    """A run that is complete."""

    arm: str
    seed: int
    learning_rate: float | None
    tuning: bool
    value: float  # of the lab's metric
    run: TrainedRun

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        about = {"arm": self.arm, "seed": self.seed, "learning_rate": self.learning_rate, "tuning": self.tuning}
        return {**about, "value": self.value, "seconds": self.run.report.get("seconds"), "run": self.run.name}


@dc.dataclass(frozen=True)
class LabReport:
    """A lab: `verdicts` by arm, `arms`, `runs`; `frame()` for a data frame."""

    verdicts: Mapping[str, ArmVerdict]
    arms: Mapping[str, Arm]
    runs: tuple[RunRow, ...]
    sweeps: Mapping[str, Mapping[float, list[float]]]  # arm -> learning rate -> metric at each seed of the tuning
    rates: Mapping[str, float | None]
    equal_weights: Mapping[str, float]  # the share of an arm's weights that starts bit-equal to those it is compared with
    seconds: Mapping[str, float]  # the median time of a run
    metric: str
    smallest: float
    level: float
    match: str | None
    out: Path
    data: Mapping[str, str]  # digests
    design: Mapping[str, Any]  # plain data
    higher_is_better: bool = False
    scaling: Mapping[str, ArmScaling] = dc.field(default_factory=dict)  # by the name of an arm in lab.yaml
    over_items: Mapping[str, PairedInterval] = dc.field(default_factory=dict)  # of a task whose items the runs report
    step_seconds: Mapping[str, float] = dc.field(default_factory=dict)  # the median time of a step of training

    def frame(self) -> dict[str, list[Any]]:
        """The runs as columns, which `pandas.DataFrame` and `polars.DataFrame` take."""
        rows = [row.to_dict() for row in self.runs]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "metric": self.metric,
            "smallest": self.smallest,
            "level": self.level,
            "match": self.match,
            "verdicts": {name: {"on": self.arms[name].on, **verdict.to_dict()} for name, verdict in self.verdicts.items()},
            "arms": [
                {
                    **arm.to_dict(),
                    "learning_rate": self.rates.get(name),
                    "seconds": self.seconds.get(name),
                    "step_seconds": self.step_seconds.get(name),
                    "equal_weights": self.equal_weights.get(name),
                }
                for name, arm in self.arms.items()
            ],
            "sweeps": {name: {str(rate): values for rate, values in sweep.items()} for name, sweep in self.sweeps.items()},
            "runs": [row.to_dict() for row in self.runs],
            "over_items": {
                name: {"low": at.low, "mean": at.mean, "high": at.high, "items": at.n} for name, at in self.over_items.items()
            },
            "scaling": {group: one.to_dict() for group, one in self.scaling.items()},
            "notes": self.notes,
            "directory": str(self.out),
            "data": dict(self.data),
            "design": dict(self.design),
            "versions": versions(),
            "sources": sources_digest(),
        }

    @property
    def notes(self) -> list[str]:
        """What a reader has to know before believing the verdicts."""
        notes: list[str] = []
        at_ends: dict[float | None, list[str]] = {}
        for name, sweep in self.sweeps.items():
            if len(sweep) > 1 and (rate := self.rates[name]) in (min(sweep), max(sweep)):
                at_ends.setdefault(rate, []).append(name)
        for rate, names in at_ends.items():
            which = f"the best learning rate, {rate:g}, is at an end of the range that was tried; widen it"
            notes.append(f"{', '.join(names)}: {which}")
        if len({len(values) for sweep in self.sweeps.values() for values in sweep.values()}) == 0 and len(self.arms) > 1:
            notes.append("no learning rate was tuned: the verdicts hold at this one")
        if self.match is None and any(
            self.arms[name].costs != self.arms[arm.on].costs for name, arm in self.arms.items() if arm.on
        ):
            notes.append("the costs of the arms were not matched")
        for name, one in self.scaling.items():
            if one.fit is None:
                notes.append(f"{name}: no scaling law: {one.reason}")
            elif not one.has_frontier:
                notes.append(f"{name}: tokens per parameter were one number, so that the law holds at this number only")
            notes += [
                f"{at.arm}: its loss is outside the interval that the law of {name} predicts; do not extrapolate it"
                for at in one.predictions
                if not at.holds
            ]
        return notes


def lab_report(state: LabState) -> LabReport:
    """Return the report of the runs so far."""
    design = state.design
    rows = [*_rows(state, tuning=True), *_rows(state, tuning=False)]
    judged = [row for row in rows if not row.tuning]
    verdicts = {name: verdict for name, arm in state.arms.items() if arm.on is not None and (verdict := state.verdict(name))}
    return LabReport(
        verdicts,
        state.arms,
        tuple(rows),
        {name: state.sweep(name) for name in state.tuned},
        {name: state.rate(name) for name in state.arms},
        {name: share for name in verdicts if (share := equal_share(state, name)) is not None},
        _medians(rows, "seconds"),
        design.metric,
        design.smallest,
        design.level,
        design.match,
        state.out,
        state.data,
        plain_design(design),
        design.higher_is_better,
        {} if design.ladder is None else arm_scaling(design.ladder, state.arms, judged),
        {name: at for name, verdict in verdicts.items() if (at := _over_items(state, name, verdict, judged)) is not None},
        _medians(rows, "step_seconds"),
    )


def _over_items(state: LabState, name: str, verdict: ArmVerdict, judged: Sequence[RunRow]) -> PairedInterval | None:
    """The interval over the items of a task, at the seeds that the verdict reads."""
    seeds = range(verdict.interval.n)
    reports = {(row.arm, row.seed): row.run.report for row in judged}
    arm, base = ([reports.get((one, seed), {}) for seed in seeds] for one in (name, state.arms[name].on or ""))
    return over_items(arm, base, verdict.interval.alpha)


def _medians(rows: Sequence[RunRow], key: str) -> dict[str, float]:
    """The median of a number that the runs of each arm report."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if (value := row.run.report.get(key)) is not None:
            values.setdefault(row.arm, []).append(float(value))
    return {name: statistics.median(some) for name, some in values.items()}


def plain_design(design: LabDesign) -> dict[str, Any]:
    """The design as lab.yaml has it; a base that is a spec is written out."""
    text = json.dumps(design.source, default=lambda value: value.to_data() if isinstance(value, Part) else str(value))
    return json.loads(text)


def _rows(state: LabState, tuning: bool) -> list[RunRow]:
    rows: list[RunRow] = []
    for name in state.tuned if tuning else state.arms:
        seeds = (state.run(name, seed) for seed in range(state.design.at_most)) if state.is_tuned(name) else ()
        for wanted in state.trials(name) if tuning else seeds:
            if (run := state.result(wanted)) is not None:
                value = run.metric(state.design.metric)
                rows.append(RunRow(name, wanted.seed, wanted.rate, tuning, value, run))
    return rows


def equal_share(state: LabState, name: str) -> float | None:
    """The share of an arm's weights whose initial values are those of the arm that it is compared with, bit for bit, at seed 0;
    None where the runs recorded none."""
    on = state.arms[name].on
    assert on is not None, "the base is compared with nothing"
    places = [find_run(state.runs, state.run(one, 0)) for one in (name, on)]
    if not all(place.is_dir() for place in places):
        return None
    mine, theirs = (read_initial(place) for place in places)
    if mine is None or theirs is None:
        return None
    sizes = {path: math.prod(one["shape"]) for path, one in mine.items()}
    return sum(size for path, size in sizes.items() if mine[path] == theirs.get(path)) / max(1, sum(sizes.values()))
