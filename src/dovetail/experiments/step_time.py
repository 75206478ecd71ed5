"""Arms of equal speed: the value of one field at which an arm trains as many tokens per second as the base, by measuring.

    base  ▌▌ ▌▌ ▌▌ …      steps of training, in turns, in one process: each round times one step of both, in alternating order,
    arm   ▐▐ ▐▐ ▐▐ …      and gives the ratio of their seconds per token
    interval              of the median ratio, by order statistics: no distribution is assumed, and a step that was interrupted
                          moves one rank

A value is accepted when its whole interval lies within the tolerance. The interval is looked at after 16, 32, … 256 rounds, and
several values may be measured: they share the level (Bonferroni), so that an arm is accepted in error with at most 5 %. What
remains unresolved after the last round is refused: the machine is too busy, or the tolerance too small. The size that was found
is stored in the directory of the lab, since another measurement may find another size, and a lab that is continued must not.
"""

from __future__ import annotations

import dataclasses as dc
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dovetail.base.errors import SpecError
from dovetail.disk.atomic import write_atomically
from dovetail.disk.shape import check_shape, data_sha256
from dovetail.disk.untrusted import parse_object, read_regular
from dovetail.model.model import Model
from dovetail.weights.surgery.budget import BUDGETS, Found, candidates, fit, match_cost

STORED = "step_times.json"
STORED_BYTES = 1 << 24
SHAPE = {"path": str, "value": int, "ratio": {"middle": float, "low": float, "high": float, "rounds": int, "threads": int}}
LOOKS = (16, 32, 64, 128, 256)  # rounds after which the interval is looked at
VALUES = 6  # of the field that are measured
ALPHA = 0.05 / len(LOOKS) / VALUES
WARM_UP = 3  # steps of each side that are not counted
OpenSteps = Callable[[Mapping[str, Any]], AbstractContextManager[Callable[[], float]]]  # a step, and its seconds per token
MayVary = Callable[[str], bool]  # whether a field, by its pattern, may be changed


@dc.dataclass(frozen=True)
class TimeRatio:
    """The time per token of an arm ÷ that of the base: the median of the rounds, with its interval."""

    middle: float
    low: float
    high: float
    rounds: int
    threads: int

    def is_within(self, tolerance: float) -> bool:
        """Whether the whole interval is within a tolerance of 1."""
        return 1 - tolerance <= self.low and self.high <= 1 + tolerance

    def is_beyond(self, tolerance: float) -> bool:
        """Whether the whole interval is outside."""
        return self.high < 1 - tolerance or self.low > 1 + tolerance

    def __str__(self) -> str:
        interval = f"{self.low:.3f} to {self.high:.3f}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.middle:.3f} of the base's time per token ({interval}; {self.rounds} pairs of steps, {threads})"


class Solved(NamedTuple):
    """The spec of an arm that trains as fast as the base, the field that was changed for it (""  for none), and the ratio."""

    spec: Model
    field: str
    ratio: TimeRatio


class Side(NamedTuple):
    """A spec, with the settings and the data of its runs."""

    spec: Model
    settings: Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def determines(self) -> dict[str, Any]:
        """What determines the time of a step; the data may be moved."""
        return {**self.settings, "spec": self.spec.to_data()}

    @property
    def run(self) -> dict[str, Any]:
        """The arguments of a run."""
        return {**self.determines, **self.data}


class _Tried(NamedTuple):
    value: int
    spec: Model
    ratio: TimeRatio


class MeasureSpeed(NamedTuple):
    """What times single steps of runs, with as many threads as the runs have."""

    steps: OpenSteps
    threads: int
    report: Callable[[str], None]


@dc.dataclass(frozen=True)
class SpeedMatcher:
    """Finds, stores and reads the sizes at which arms are as fast as the base."""

    measure: MeasureSpeed | None  # None: sizes are read, and none is measured
    stored: Path
    tolerance: float
    length: int  # of the sequences, for FLOPs

    def solve(self, name: str, base: Side, arm: Side, vary: str | None, may_vary: MayVary) -> Solved:
        """Return the arm at the speed of the base; raise SpecError where no value of a field brings it there."""
        key, stored = data_sha256({"base": base.determines, "arm": arm.determines, "vary": vary}), self._read()
        if key in stored and (ratio := TimeRatio(**stored[key]["ratio"])).is_within(self.tolerance):
            path, value = stored[key]["path"], stored[key]["value"]
            return _solved(arm.spec, path, value, arm.spec.set(path, value) if path else arm.spec, ratio)
        if self.measure is None:
            raise SpecError(f"arms.{name}", "its speed was not measured", "run the lab")
        self.measure.report(f"timing steps of {name} and of the base")
        with _threads(self.measure.threads):
            path, tried = self._search(self.measure, name, (base, arm), vary, may_vary)
        entry = {"path": path, "value": tried.value, "ratio": dc.asdict(tried.ratio)}
        write_atomically(self.stored, json.dumps({**stored, key: entry}, indent=1) + "\n")
        return _solved(arm.spec, path, tried.value, tried.spec, tried.ratio)

    def _read(self) -> dict[str, Any]:
        if not self.stored.is_file():
            return {}
        text = read_regular(self.stored, STORED_BYTES, "the measured speeds of a lab")
        data = parse_object(text.encode(), str(self.stored))
        check_shape(data, {str: SHAPE}, str(self.stored))
        return data

    def _search(
        self, by: MeasureSpeed, name: str, sides: tuple[Side, Side], vary: str | None, may_vary: MayVary
    ) -> tuple[str, _Tried]:
        """The path of the field, "" where none is changed, and the value that was accepted."""
        base, arm = sides
        path, tried = "", list[_Tried]()
        value, spec = 0, arm.spec
        with by.steps(base.run) as base_step:
            while True:
                with by.steps(arm._replace(spec=spec).run) as arm_step:
                    tried.append(_Tried(value, spec, time_ratio(base_step, arm_step, self.tolerance, by.threads)))
                if tried[-1].ratio.is_within(self.tolerance):
                    return path if len(tried) > 1 else "", tried[-1]
                if len(tried) == 1:
                    first = self._first(arm.spec, tried[0].ratio, vary, may_vary)
                    if first is None:
                        break
                    path, tried[0] = first.path, tried[0]._replace(value=first.old)
                    value, spec = first.value, first.spec
                    continue
                following = None if len(tried) == VALUES else _following(arm.spec, path, tried)
                if following is None or following.value in [at.value for at in tried]:
                    break
                value, spec = following.value, following.spec
        nearest = _nearest(tried)[0]
        raise self._refusal(name, path, nearest)

    def _first(self, spec: Model, ratio: TimeRatio, vary: str | None, may_vary: MayVary) -> Found | None:
        """The field to change, and a value that FLOPs suggest: time that is fixed makes it too small a change."""

        def flops(changed: Model) -> float:
            return BUDGETS["flops"](changed, self.length)

        fields = match_cost(spec, flops, flops(spec) / ratio.middle, vary)
        legal = [field for field in fields if vary is not None or may_vary(field.path)]
        return min(legal, key=lambda field: field.path == "width", default=None)  # the width changes every weight

    def _refusal(self, name: str, path: str, nearest: _Tried) -> SpecError:
        at, within = f" with {path}={nearest.value}" if path else "", f"{self.tolerance:.0%} of the base"
        if nearest.ratio.is_beyond(self.tolerance):
            which = f"{path} does not bring" if path else "no field outside its changes brings"
            problem = f"{which} its time per token within {within}: {nearest.ratio}{at}"
            return SpecError(f"arms.{name}", problem, "name another field with `vary`, change the arm, or match flops")
        problem = f"whether its time per token is within {within} is not resolved: {nearest.ratio}{at}"
        return SpecError(f"arms.{name}", problem, "free the machine, or allow more: `match: {tokens_per_second: 0.1}`")


def time_ratio(base: Callable[[], float], arm: Callable[[], float], tolerance: float, threads: int) -> TimeRatio:
    """Time steps of both sides in turns until the interval of the ratio is within the tolerance, or outside."""
    for _ in range(WARM_UP):
        base()
        arm()
    ratios: list[float] = []
    while True:
        if len(ratios) % 2:
            above = arm()
            ratios.append(above / base())
        else:
            below = base()
            ratios.append(arm() / below)
        if len(ratios) in LOOKS:
            ratio = TimeRatio(*median_interval(ratios, ALPHA), len(ratios), threads)
            if ratio.is_within(tolerance) or ratio.is_beyond(tolerance) or len(ratios) == LOOKS[-1]:
                return ratio


def median_interval(sample: Sequence[float], alpha: float) -> tuple[float, float, float]:
    """The median, and the ends of its interval at the level 1 − alpha: two order statistics, for any distribution."""
    values, n = sorted(sample), len(sample)
    middle = (values[(n - 1) // 2] + values[n // 2]) / 2
    below, rank = 0.0, -1  # P(Binomial(n, ½) ≤ rank) ≤ alpha / 2
    while (below := below + math.comb(n, rank + 1) / 2**n) <= alpha / 2:
        rank += 1
    if rank < 0:
        return middle, 0.0, math.inf
    return middle, values[rank], values[n - 1 - rank]


def _nearest(tried: Sequence[_Tried]) -> list[_Tried]:
    return sorted(tried, key=lambda at: abs(math.log(at.ratio.middle)))


def _following(spec: Model, path: str, tried: Sequence[_Tried]) -> Found | None:
    """The legal value where the line through the two nearest ratios is 1; None where the time does not grow with the field."""
    a, b = _nearest(tried)[:2]
    rise = (b.ratio.middle - a.ratio.middle) * (b.value - a.value)
    if rise <= 0:
        return None
    target = a.value + (1 - a.ratio.middle) * (b.value - a.value) / (b.ratio.middle - a.ratio.middle)
    if target < 1:
        return None
    return fit(spec, path, candidates(spec)[path], lambda changed: candidates(changed)[path], target)


def _solved(old: Model, path: str, value: int, spec: Model, ratio: TimeRatio) -> Solved:
    return Solved(spec, f"{path} {candidates(old)[path]:,} → {value:,}" if path else "", ratio)


@contextmanager
def _threads(count: int) -> Generator[None]:
    """Compute with as many threads as the runs of the lab do."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
