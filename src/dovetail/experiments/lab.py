"""A lab: which runs are needed, in which order, and what follows from them.

    tuning     every arm trains its trials at the same learning rates, on seeds that no verdict reads; the lowest mean loss wins
    verdicts   seed 0, 1, 2 … of every arm whose verdict is not in, and of the arm that it is compared with, until it is in or
               `at_most` is reached; a process without work trains the next seed ahead

What is next follows only from the results on disk: a lab that was killed and started again trains what is missing, and comes to
the same verdicts, since these read the seeds in their order (verdict.py).
"""

from __future__ import annotations

import dataclasses as dc
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.disk.atomic import try_locked
from dovetail.experiments.arms import Arm, build_arms, training_length
from dovetail.experiments.cluster import ClusterPool
from dovetail.experiments.design import SPEED, LabDesign
from dovetail.experiments.lab_runs import RUNS, RunRequest, digests, find_run, request
from dovetail.experiments.pool import RunPool, WorkerPool
from dovetail.experiments.results import TUNING_SEED, TrainedRun, read_result
from dovetail.experiments.step_time import STORED, MeasureSpeed, OpenSteps, SpeedMatcher
from dovetail.experiments.verdict import ArmVerdict, judge
from dovetail.training.checkpoint import CHECKPOINTS

LOCK = "lab.lock"
WAIT = 0.5  # seconds between looks at the clock
Decided = Callable[[dict[str, Any], str], None]  # the data of a verdict that is in, and a line of text
Progress = Callable[[int, int, str], None]  # runs that are complete, about how many in all, a line of text


class LabState:
    """The runs of a lab so far, and what follows from them."""

    def __init__(self, design: LabDesign, out: Path, measure: MeasureSpeed | None = None) -> None:
        self.design, self.out = design, out
        self.data, self.runs = digests(design), open_runs(out)
        speed = SpeedMatcher(measure, out / STORED, design.within, training_length(design)) if design.match == SPEED else None
        self.arms: dict[str, Arm] = build_arms(design, speed)
        self.results: dict[str, TrainedRun] = {}  # by key
        self.missing: set[str] = set()  # keys that were looked for on disk

    # -- runs

    def result(self, wanted: RunRequest) -> TrainedRun | None:
        """What a run measured; None if it is not complete."""
        if wanted.key not in self.results and wanted.key not in self.missing:
            found = read_result(find_run(self.runs, wanted))
            if found is None:
                self.missing.add(wanted.key)
            else:
                self.results[wanted.key] = found
        return self.results.get(wanted.key)

    def complete(self, wanted: RunRequest) -> TrainedRun:
        """Read the result of a run that has just ended. Its checkpoints are deleted: the directory has its weights."""
        shutil.rmtree(find_run(self.runs, wanted) / CHECKPOINTS, ignore_errors=True)
        self.missing.discard(wanted.key)
        found = self.result(wanted)
        assert found is not None, "the process wrote a result"
        return found

    def trials(self, arm: str) -> Iterator[RunRequest]:
        """The runs that choose the learning rate of an arm; under µP those of its smallest size."""
        if (tune := self.design.tune) is not None:
            for rate in tune.rates:
                for seed in range(tune.seeds):
                    yield self._request(self.arms[arm].rate_of, TUNING_SEED + seed, rate, tuning=True)

    @property
    def tuned(self) -> list[str]:
        """The arms with trials of their own."""
        return [name for name, arm in self.arms.items() if arm.rate_of == name]

    def run(self, arm: str, seed: int) -> RunRequest:
        """The run of an arm at a seed, at its learning rate."""
        return self._request(arm, seed, self.rate(arm), tuning=False)

    def _request(self, arm: str, seed: int, rate: float | None, tuning: bool) -> RunRequest:
        key = (arm, seed, rate, tuning)
        if key not in self._requests:
            self._requests[key] = request(self.design, self.arms[arm], seed, rate, tuning, self.data)
        return self._requests[key]

    @cached_property
    def _requests(self) -> dict[tuple[str, int, float | None, bool], RunRequest]:
        return {}

    # -- tuning

    def sweep(self, arm: str) -> dict[float, list[float]]:
        """The metrics of each learning rate that was tried, of complete runs."""
        found: dict[float, list[float]] = {}
        for trial in self.trials(arm):
            assert trial.rate is not None
            if (result := self.result(trial)) is not None:
                found.setdefault(trial.rate, []).append(result.metric(self.design.metric))
        return found

    def is_tuned(self, arm: str) -> bool:
        """Whether no trial of an arm is missing."""
        return all(self.result(trial) is not None for trial in self.trials(arm))

    def rate(self, arm: str) -> float | None:
        """The learning rate of an arm whose trials are complete: that of the best mean metric."""
        means = {rate: sum(values) / len(values) for rate, values in self.sweep(arm).items()}
        finite = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
        if not finite:
            return self.design.tune.low if self.design.tune else None  # every trial diverged: the verdict will say so
        best = max if self.design.higher_is_better else min
        return best(finite, key=lambda rate: finite[rate])

    # -- verdicts

    def metrics(self, arm: str) -> list[float]:
        """The metric of an arm at seeds 0, 1, 2 …, up to the first that is not complete."""
        values: list[float] = []
        while self.is_tuned(arm) and len(values) < self.design.at_most:
            result = self.result(self.run(arm, len(values)))
            if result is None:
                break
            values.append(result.metric(self.design.metric))
        return values

    def verdict(self, name: str) -> ArmVerdict | None:
        """The verdict on an arm so far; None before the first seed that both arms have."""
        arm = self.arms[name]
        assert arm.on is not None, "the base has no verdict"
        both = list(zip(self.metrics(name), self.metrics(arm.on), strict=False))
        if not both:
            return None
        design = self.design
        return judge(
            [a for a, _ in both],
            [b for _, b in both],
            smallest=design.smallest,
            at_least=design.at_least,
            alpha=1 - design.level,
            comparisons=sum(arm.on is not None for arm in self.arms.values()),
            higher_is_better=design.higher_is_better,
        )

    def is_decided(self, name: str) -> bool:
        """Whether an arm needs no further seed."""
        verdict = self.verdict(name)
        return verdict is not None and (verdict.resolved or verdict.interval.n >= self.design.at_most)

    def wanted(self, ahead: int = 0) -> Iterator[RunRequest]:
        """The runs that are missing, the most urgent first; of each open arm also `ahead` seeds beyond the next one."""
        for name in self.tuned:
            yield from (trial for trial in self.trials(name) if self.result(trial) is None)
        needed = dict.fromkeys(name for arm in self.open_arms() for name in (arm.on, arm.name) if name is not None)
        complete = min((len(self.metrics(name)) for name in needed), default=0)
        for seed in range(min(max(self.design.at_least, complete + 1) + ahead, self.design.at_most)):
            for name in needed:
                if self.is_tuned(name) and self.result(run := self.run(name, seed)) is None:
                    yield run

    def open_arms(self) -> list[Arm]:
        """The arms that need further seeds: without a verdict, or too few for the fit of a scaling law."""

        def is_open(arm: Arm) -> bool:
            if arm.on is not None:
                return not self.is_decided(arm.name)
            return self.design.ladder is not None and len(self.metrics(arm.name)) < self.design.at_least

        return [arm for arm in self.arms.values() if is_open(arm)]

    def left(self) -> int:
        """About how many runs are missing, if means and spreads stay as they are."""
        design, needed = self.design, dict[str, int]()
        trials = sum(self.result(trial) is None for name in self.tuned for trial in self.trials(name))
        for arm in self.open_arms():
            name = arm.name
            if arm.on is None:
                needed[name] = max(needed.get(name, 0), design.at_least)
                continue
            verdict = self.verdict(name)
            n = 0 if verdict is None else verdict.interval.n
            more = design.at_most if verdict is None or verdict.more is None or n < design.at_least else verdict.more
            until = min(max(design.at_least, n + more if n >= design.at_least else 0), design.at_most)
            for side in (name, arm.on):
                needed[side] = max(needed.get(side, 0), until)
        return trials + sum(max(0, until - len(self.metrics(name))) for name, until in needed.items())


def open_runs(out: Path) -> Path:
    """Return the directory of the runs of a lab, which is made where there is none."""
    if out.exists() and not out.is_dir():
        raise FileError(f"{out}: is not a directory; choose another path")
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    return out / RUNS


def run_lab(
    design: LabDesign,
    out: Path,
    train: Callable[..., Any],
    workers: int | None = None,
    threads: int = 1,
    cluster: str | None = None,
    decided: Decided = lambda data, text: None,
    progress: Progress = lambda done, total, text: None,
    steps: OpenSteps | None = None,
) -> LabState:
    """Train what is missing in a directory until every verdict is in; return its runs.

    `train(arguments, out=…, quiet=True)` trains a run, in `workers` other processes with `threads` each; by default on all
    cores. With `cluster`, the address of a Ray cluster, they are tasks on its nodes. `steps` opens a run of which single steps
    are timed: where arms are to be as fast as the base, this process measures them before the first run, with `threads`.
    """
    if design.match == SPEED and cluster is not None:
        raise FileError(f"match: {SPEED} is measured on this machine; leave the cluster out, or match flops")
    measure = None if steps is None else MeasureSpeed(steps, threads, lambda text: progress(0, 1, text))
    open_runs(out)
    (out / LOCK).touch()
    with try_locked(out / LOCK) as free:
        if not free:
            raise FileError(f"{out}: another process runs a lab in this directory")
        state = LabState(design, out, measure)
        with _pool(train, workers, threads, out, cluster) as pool:
            _Conductor(state, pool, decided, progress).run()
    return state


def _pool(train: Callable[..., Any], workers: int | None, threads: int, out: Path, cluster: str | None) -> RunPool:
    if cluster is not None:
        return ClusterPool(train, workers, threads, cluster)
    return WorkerPool(train, workers or max(1, len(os.sched_getaffinity(0)) // threads), threads, out)


@dc.dataclass
class _Conductor:
    """Gives runs to processes, and reports what they decide."""

    state: LabState
    pool: RunPool
    tell: Decided
    progress: Progress
    seconds: list[float] = dc.field(default_factory=list)  # of the runs of this process
    decided: set[str] = dc.field(default_factory=set)

    def run(self) -> None:
        """Train until nothing is wanted."""
        running: dict[Path, tuple[RunRequest, float]] = {}
        self._report()
        while True:
            keys = {wanted.key for wanted, _ in running.values()}
            for wanted in self.state.wanted(self.pool.workers // 2) if self.pool.free else ():
                if not self.pool.free:
                    break
                if wanted.key not in keys:
                    place = find_run(self.state.runs, wanted)
                    keys.add(wanted.key)
                    running[place] = wanted, time.monotonic()
                    self.pool.start(place, wanted.arguments)
            if not running:
                return
            if (place := self.pool.wait(WAIT)) is not None:
                wanted, begin = running.pop(place)
                self.seconds.append(time.monotonic() - begin)
                self._completed(wanted)
                if not self.state.open_arms():
                    return  # what was trained ahead is not waited for

    def _completed(self, wanted: RunRequest) -> None:
        self.state.complete(wanted).metric(self.state.design.metric)  # which raises for one that is not measured
        self._report()

    def _report(self) -> None:
        """Report the verdicts that are new, and how far the lab is."""
        shown: list[str] = []
        for name, arm in self.state.arms.items():
            if arm.on is None or (verdict := self.state.verdict(name)) is None:
                continue
            if self.state.is_decided(name) and name not in self.decided:
                self.decided.add(name)
                data = {"arm": name, "on": arm.on, **verdict.to_dict()}
                self.tell(data, f"{name} against {arm.on}: {verdict}")
            elif not self.state.is_decided(name):
                at = verdict.interval
                around = "" if math.isinf(at.half) else f" ({at.low:+.3f} to {at.high:+.3f})"
                shown.append(f"{name} {at.mean:+.3f}{around} at {at.n}")
        left, done = self.state.left(), len(self.state.results)
        if self.seconds and left:
            minutes = left * sum(self.seconds) / len(self.seconds) / self.pool.workers / 60
            shown.append(f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left")
        stage = "tuning" if not all(map(self.state.is_tuned, self.state.arms)) else "training" if left else "complete"
        self.progress(done, done + left, " · ".join(shown) or stage)
