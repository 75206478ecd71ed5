"""The design of a lab, as lab.yaml says it: a base, arms that change it, what is equal between them, seeds, and the question.

    base: llama-tiny                                    a preset, a .yaml file, a model directory, or a spec written out
    arms:
      gqa:    {set: {layers.*.mixer.kv_heads: 2}}       as `--set` and `--swap` of every verb
      mla:    {on: gqa, swap: {mixer: mla}}             on top of another arm, and compared with it: a staircase
      muon:   {train: {optimizer: muon}}                other keys of the run file
    match: flops                                        params | flops | decode_state | tokens_per_second; per arm `vary: PATH`
                                                        names the field; {tokens_per_second: 0.1}: within 10 %, not 5 %
    data: {text: plays.txt}                             or data: [DIR, …], task: {kind: mqar, pairs: 8}: as of `train`
    train: {batch: 8, length: 128}                      keys of the run file of every arm
    budget: {tokens: 300k}                              or {steps: 400}
    tune: {learning_rate: [3e-4, 1e-2], trials: 5}      equally spaced logarithms, on seeds of their own (`seeds: 1` of them)
    seeds: {at_least: 14, at_most: 30}
    metric: val_loss                                    or a task of lm-eval: {lm_eval: my_task, tasks: DIR} (outside_metric.py)
    probe: {tasks: [needle], lengths: [64, 128]}        of every run (long_context.py); metrics probe_accuracy, used_length
    smallest: 0.02                                      a difference below it does not matter
    sizes: [60k, 120k, 250k]                            every arm at every size, and a scaling law of each (ladder.py)
    level: 0.95                                         of all intervals together

Paths are relative to the working directory, as those of flags are.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError, names_or_nearest
from dovetail.base.units import read_count
from dovetail.disk.yaml import parse_yaml, read_text
from dovetail.experiments.ladder import BUDGETS, Ladder
from dovetail.experiments.long_context import read_context
from dovetail.experiments.outside_metric import OutsideMetric
from dovetail.spec.part import plain

BASE = "base"
SPEED = "tokens_per_second"  # a cost that is measured (step_time.py); the others are counted
MATCHES = {"params": "params", "flops": "flops", "decode_state": "kv"}  # name in lab.yaml -> budget of `match`
PROBED = ("probe_accuracy", "used_length")  # of the probe of long context after a run
HIGHER = ("accuracy", "exact_match", *PROBED)
METRICS = {name: name in HIGHER for name in ("val_loss", "train_loss", "bits_per_byte", *HIGHER)}  # whether higher is better
KEYS = ("base", "arms", "match", "data", "train", "budget", "tune", "seeds", "metric", "probe", "smallest")
KEYS += ("level", "sizes", "held_out")
OURS = ("spec", "set", "swap", "out", "seed", "minutes", "epochs", "force", "from", "adapter", "tokens")
OURS += ("steps", "quiet", "log")
MOST_ARMS, MOST_TRIALS, MOST_SEEDS = 64, 64, 1000


@dc.dataclass(frozen=True)
class ArmDesign:
    """What an arm changes, and of which arm."""

    name: str
    on: str = BASE
    swap: Mapping[str, Any] = dc.field(default_factory=dict)
    set: Mapping[str, Any] = dc.field(default_factory=dict)
    train: Mapping[str, Any] = dc.field(default_factory=dict)
    vary: str | None = None  # the field that matching changes


@dc.dataclass(frozen=True)
class Tuning:
    """A range of learning rates, and how many are tried, each on some seeds that no verdict uses."""

    low: float
    high: float
    trials: int
    seeds: int = 1

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates, with equally spaced logarithms."""
        steps = (i / (self.trials - 1) for i in range(self.trials))
        return tuple(float(f"{self.low * (self.high / self.low) ** step:.4g}") for step in steps)


@dc.dataclass(frozen=True)
class LabDesign:
    """A lab before anything is built."""

    base: Any  # what names a spec
    arms: tuple[ArmDesign, ...]
    data: Mapping[str, Any]
    budget: Mapping[str, Any]
    train: Mapping[str, Any] = dc.field(default_factory=dict)
    match: str | None = None
    within: float = 0.05  # of the base's time per token, where this is what is matched
    tune: Tuning | None = None
    at_least: int = 14  # with fewer seeds, skewed differences are called different too often (benchmarks/lab.py)
    at_most: int = 30
    metric: str = "val_loss"
    smallest: float = 0.0
    level: float = 0.95
    ladder: Ladder | None = None  # in place of the budget
    outside: OutsideMetric | None = None  # whose label is the metric
    probe: Mapping[str, Any] | None = None  # the fields of a ContextDesign
    source: Mapping[str, Any] = dc.field(default_factory=dict, compare=False)  # as it was given

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is the better one."""
        return METRICS[self.metric] if self.outside is None else self.outside.higher_is_better

    def __post_init__(self) -> None:
        if self.metric in PROBED and self.probe is None:
            raise FileError(
                f"metric: {self.metric} is of a probe; also give `probe`, such as {{tasks: [needle], lengths: [64]}}"
            )
        if self.outside is None and self.metric not in METRICS:
            raise FileError(f"metric: {self.metric!r} is not measured; {names_or_nearest(self.metric, METRICS, 'metrics')}")


def read_design(source: str | Path | Mapping[str, Any]) -> LabDesign:
    """Return the design in a file, or in a mapping of the same keys; raise FileError with the path of what is wrong."""
    if isinstance(source, Mapping):
        return _design(dict(source), "lab")
    return _design(parse_yaml(read_text(Path(source)), str(source)), str(source))


def _design(data: Any, where: str) -> LabDesign:
    at = _DesignReader(where)
    top = at.mapping(data, "", KEYS, required=("base", "arms", "data", "budget"))
    base, arms, ladder = top["base"], at.mapping(top["arms"], "arms", None), at.ladder(top)
    if not (0 if ladder else 1) <= len(arms) <= MOST_ARMS:
        at.refuse("arms", f"{len(arms)} arms; a lab has from 1 to {MOST_ARMS}")
    budget = {} if ladder else at.mapping(top["budget"], "budget", ("tokens", "steps"))
    if len(budget) != 1 and ladder is None:
        at.refuse("budget", "give tokens or steps; a run of some minutes is not the same run twice")
    ends = {name: at.count(value, f"budget.{name}") for name, value in budget.items()}
    files = at.mapping(top["data"], "data", ("text", "data", "task", "labels", "tags", "pairs"), required=())
    if not files:
        at.refuse("data", "give text, data or task")
    seeds = at.mapping(top.get("seeds", {}), "seeds", ("at_least", "at_most"))
    least = at.whole(seeds.get("at_least", LabDesign.at_least), "seeds.at_least", 2, MOST_SEEDS)
    most = at.whole(seeds.get("at_most", max(least, LabDesign.at_most)), "seeds.at_most", least, MOST_SEEDS)
    (match, within), outside = at.match(top.get("match")), at.outside(top.get("metric"))
    try:
        return LabDesign(
            base=base,
            arms=at.arms(arms),
            data={key: plain(value) for key, value in files.items()},
            budget={name: round(value) for name, value in ends.items()},
            train=at.keys(top.get("train", {}), "train"),
            match=match,
            within=within,
            tune=at.tuning(top["tune"]) if top.get("tune") is not None else None,
            at_least=least,
            at_most=most,
            metric=str(top.get("metric", LabDesign.metric)) if outside is None else outside.label,
            outside=outside,
            smallest=at.number(top.get("smallest", 0.0), "smallest", 0.0, math.inf),
            ladder=ladder,
            source=top,
            probe=at.probe(top.get("probe")),
            level=at.number(top.get("level", LabDesign.level), "level", 0.5, 0.9999),
        )
    except FileError as error:
        if str(error).startswith(where):
            raise
        raise FileError(f"{where}: {error}") from None


class _DesignReader:
    """Reads values; an error names the file and the path of the value."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, path: str, problem: str) -> None:
        """Raise FileError for the value at a path."""
        raise FileError(f"{self.where}: {path + ': ' if path else ''}{problem}")

    def mapping(self, value: Any, path: str, known: Sequence[str] | None, required: Sequence[str] = ()) -> dict[str, Any]:
        """A mapping with these keys; None: any."""
        if not isinstance(value, Mapping):
            self.refuse(path, f"{str(value)[:60]!r} is not a mapping")
        for key in value:
            if known is not None and key not in known:
                self.refuse(f"{path}.{key}" if path else str(key), f"is not a key; {names_or_nearest(str(key), known, 'keys')}")
        if missing := [key for key in required if key not in value]:
            self.refuse(path, f"{missing[0]} is missing")
        return {str(key): item for key, item in value.items()}

    def number(self, value: Any, path: str, low: float, high: float) -> float:
        """A number within bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(path, f"{str(value)[:60]} is not a number from {low:g} to {high:g}")
        return float(value)

    def whole(self, value: Any, path: str, low: int, high: int) -> int:
        """A whole number within bounds."""
        if type(value) is not int or not low <= value <= high:
            self.refuse(path, f"{str(value)[:60]} is not a whole number from {low} to {high}")
        return value

    def count(self, value: Any, path: str) -> float:
        """A count such as 300k."""
        try:
            number = read_count(value)
        except ValueError as error:
            raise FileError(f"{self.where}: {path}: {error}") from None
        return self.number(number, path, 1, 1e15)

    def counts(self, value: Any, path: str) -> list[float]:
        """Different counts, in rising order."""
        found = [self.count(item, path) for item in (value if isinstance(value, list) else [value])]
        if len({*found}) != len(found) or not found:
            self.refuse(path, "is empty, or has a number twice")
        return sorted(found)

    def ladder(self, top: Mapping[str, Any]) -> Ladder | None:
        """The sizes with their budgets; None: the base has its own."""
        if "sizes" not in top:
            if "held_out" in top:
                self.refuse("held_out", "is of sizes that no fit reads; give sizes, too")
            return None
        sizes, held_out = (
            self.counts(top["sizes"], "sizes"),
            self.counts(top["held_out"], "held_out") if "held_out" in top else [],
        )
        if shared := {*sizes} & {*held_out}:
            self.refuse("held_out", f"{min(shared):g} is among sizes, too; leave it out of one")
        budget = self.mapping(top["budget"], "budget", BUDGETS)
        if len(budget) != 1:
            self.refuse("budget", f"give one of {', '.join(BUDGETS)}")
        if METRICS.get(str(top.get("metric", LabDesign.metric)), True):
            self.refuse("metric", "a scaling law is fitted to a loss; leave sizes out, or choose val_loss")
        ((by, value),) = budget.items()
        return Ladder(tuple(sorted([*sizes, *held_out])), frozenset(held_out), by, tuple(self.counts(value, f"budget.{by}")))

    def outside(self, value: Any) -> OutsideMetric | None:
        """A task of lm-eval; None: the metric is one of ours."""
        if not isinstance(value, Mapping):
            return None
        known = ("lm_eval", "name", "tasks", "higher_is_better", "limit")
        data = self.mapping(value, "metric", known, required=("lm_eval",))
        if not isinstance(better := data.pop("higher_is_better", True), bool):
            self.refuse("metric.higher_is_better", "is true or false")
        limit = None if data.get("limit") is None else self.whole(data["limit"], "metric.limit", 2, 1 << 24)
        tasks = None if data.get("tasks") is None else str(data["tasks"])
        return OutsideMetric(str(data["lm_eval"]), str(data.get("name", "acc")), tasks, better, limit)

    def match(self, value: Any) -> tuple[str | None, float]:
        """The cost that is made equal, and within which tolerance the time per token is."""
        if isinstance(value, Mapping):
            data = self.mapping(value, "match", (SPEED,), required=(SPEED,))
            return SPEED, self.number(data[SPEED], f"match.{SPEED}", 0.01, 0.5)
        if value is not None and value not in (*MATCHES, SPEED):
            self.refuse("match", f"{value!r} is not a cost; {names_or_nearest(str(value), (*MATCHES, SPEED), 'costs')}")
        return value, LabDesign.within

    def keys(self, value: Any, path: str) -> dict[str, Any]:
        """Keys of a run file, but those that the lab sets."""
        keys = self.mapping(value, path, None)
        for key in keys:
            if key in OURS:
                self.refuse(f"{path}.{key}", "is set by the lab (by base, arms, budget, seeds or --out)")
        return keys

    def probe(self, value: Any) -> dict[str, Any] | None:
        """The probe of long context of every run."""
        if value is None:
            return None
        fields = {key: plain(field) for key, field in self.mapping(value, "probe", None).items()}
        return {**fields, "tasks": [plain(task) for task in read_context(fields).tasks]}

    def tuning(self, value: Any) -> Tuning:
        """The learning rates to try."""
        data = self.mapping(value, "tune", ("learning_rate", "trials", "seeds"), required=("learning_rate", "trials"))
        ends = data["learning_rate"]
        if not isinstance(ends, list) or len(ends) != 2:
            self.refuse("tune.learning_rate", "give the lowest and the highest: [3e-4, 1e-2]")
        low, high = (self.number(end, "tune.learning_rate", 1e-12, 1e3) for end in ends)
        if low >= high:
            self.refuse("tune.learning_rate", f"{low:g} is not below {high:g}")
        trials = self.whole(data["trials"], "tune.trials", 2, MOST_TRIALS)
        return Tuning(low, high, trials, self.whole(data.get("seeds", 1), "tune.seeds", 1, MOST_SEEDS))

    def arms(self, arms: Mapping[str, Any]) -> tuple[ArmDesign, ...]:
        """The arms in their order; an arm stands on the base or on one above it."""
        found: dict[str, ArmDesign] = {}
        for name, value in arms.items():
            path = f"arms.{name}"
            if not name.replace("-", "").replace("_", "").isalnum() or name == BASE:
                self.refuse(path, "is not a name; use letters, digits, - and _ (base is the name of the base)")
            data = self.mapping({} if value is None else value, path, ("on", "swap", "set", "train", "vary"))
            on = str(data.get("on", BASE))
            if on != BASE and on not in found:
                self.refuse(f"{path}.on", f"{on!r} is not an arm above it; {names_or_nearest(on, [BASE, *found], 'arms')}")
            swap, changes = (self.mapping(data.get(key, {}), f"{path}.{key}", None) for key in ("swap", "set"))
            train = self.keys(data.get("train", {}), f"{path}.train")
            found[name] = ArmDesign(name, on, swap, changes, train, data.get("vary"))
        return tuple(found.values())
