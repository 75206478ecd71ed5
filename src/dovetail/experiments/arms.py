"""The arms of a lab as specs: each a base with changes, its cost made equal to that of the base by one field, and its costs.

    base ─ set, swap ─> arm ─ match ─> arm of equal cost
      └─ on: gqa ─ set, swap ─> …         a staircase: each arm stands on the last, and is compared with it

The field that makes the costs equal is one that the arm does not change: no field of a part that differs from the base's is
solved for, unless `vary` names it; the width, which changes every weight, only if nothing else can be. An arm that no field
brings within 1 % is refused. Tokens per second are not counted but measured, within 5 % (step_time.py).

In a lab with sizes (ladder.py) all this is done at each size. Under µP the learning rate that is best at the smallest size is
that of the others; else every size has trials of its own.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.account import Account
from dovetail.base.errors import SpecError
from dovetail.experiments.design import BASE, MATCHES, PROBED, SPEED, ArmDesign, LabDesign
from dovetail.experiments.ladder import Rung, rungs
from dovetail.experiments.step_time import Side, SpeedMatcher, TimeRatio
from dovetail.files.spec import changed
from dovetail.hf.origin import find_spec
from dovetail.model.model import Model
from dovetail.spec.check import check
from dovetail.spec.fold import parameters
from dovetail.training.task import objective_kind, reads_of
from dovetail.weights.surgery import diff
from dovetail.weights.surgery.budget import BUDGETS, TOLERANCE, match_budget
from dovetail.weights.surgery.groups import field_groups


@dc.dataclass(frozen=True)
class ArmCosts:
    """What a model costs, counted from its spec."""

    parameters: int
    flops_per_token: float  # of a forward pass
    decode_state: int  # bytes, after one sequence of the training length


@dc.dataclass(frozen=True)
class Arm:
    """A spec with the settings of its runs."""

    name: str
    on: str | None  # the arm that it is compared with; None: it is the base
    spec: Model
    train: Mapping[str, Any]  # keys of its run files, beside spec, data, seed and learning rate
    costs: ArmCosts
    changes: tuple[tuple[str, str, str], ...] = ()  # (path, value there, value here) against what it is compared with
    solved: str = ""  # the field that makes the costs equal: path old → new
    time_ratio: TimeRatio | None = None  # the measured time per token ÷ that of the base, where this was made equal
    budget: Mapping[str, int] = dc.field(default_factory=dict)  # keys of its run files
    group: str = BASE  # its name in lab.yaml, which is that of the arm at every size
    rate_of: str = ""  # the arm whose trials choose its learning rate
    held_out: bool = False  # no fit of a scaling law reads its runs

    def to_dict(self) -> dict[str, Any]:
        """The arm as plain data."""
        return {
            "arm": self.name,
            "on": self.on,
            "changes": [list(change) for change in self.changes],
            "solved": self.solved,
            "time_ratio": None if self.time_ratio is None else dc.asdict(self.time_ratio),
            **dc.asdict(self.costs),
            "spec": self.spec.to_data(),
        }


def build_arms(design: LabDesign, speed: SpeedMatcher | None = None) -> dict[str, Arm]:
    """Return the base and the arms by name; `speed` is that of a lab whose arms are to be as fast as the base."""
    base = find_spec(design.base)
    check(base)
    steps = [Rung("", base, design.budget)] if design.ladder is None else rungs(design.ladder, base)
    found: dict[str, Arm] = {}
    first: dict[str, str] = {}  # the arm of each group at the smallest size
    for arm in (arm for rung in steps for arm in _arms(design, rung, speed)):
        if arm.name in found:
            raise SpecError(f"arms.{arm.name}", "is the name of two arms, one of which is a size of another", "rename one")
        smallest = first.setdefault(arm.group, arm.name)
        transfers = arm.spec.init.tied_scale(arm.spec.width) is not None  # the initialization is made for it (µP)
        found[arm.name] = dc.replace(arm, rate_of=smallest if transfers else arm.name)
    return found


def _arms(design: LabDesign, rung: Rung, speed: SpeedMatcher | None) -> Iterator[Arm]:
    base, length, suffix = rung.base, training_length(design), rung.suffix
    specs: dict[str, Model] = {BASE: base}  # before their costs are made equal: a staircase does not solve for a solved field
    equal = dict(specs)
    settings: dict[str, Mapping[str, Any]] = {BASE: design.train}
    run = {"budget": rung.budget, "held_out": rung.held_out}
    yield Arm(BASE + suffix, None, base, design.train, costs(base, length), **run)
    for arm in design.arms:
        solved, ratio = "", None
        try:
            spec = specs[arm.name] = changed(specs[arm.on], arm.set, arm.swap)
            check(spec)
        except SpecError as error:
            raise SpecError(f"arms.{arm.name}: {error.path}", error.problem, error.remedy) from None
        _same_objective(design, arm, (specs[arm.on], settings[arm.on]), (spec, {**settings[arm.on], **arm.train}))
        settings[arm.name] = {**settings[arm.on], **arm.train}
        if design.match == SPEED:
            assert speed is not None, "the lab measures"
            pairs = ((settings[BASE], base), (settings[arm.name], spec))
            sides = (Side(at, run_settings(train, rung.budget), design.data) for train, at in pairs)
            spec, solved, ratio = speed.solve(arm.name + suffix, *sides, arm.vary, _unchanged(base, spec))
        elif design.match is not None:
            spec, solved = matched(arm, base, spec, design.match, length)
        equal[arm.name] = spec
        trained = ((f"train.{key}", str(settings[arm.on].get(key, "default")), str(value)) for key, value in arm.train.items())
        changes = [(group.paths, group.a, group.b) for group in field_groups(diff(equal[arm.on], spec))]
        changes = [change for change in changes if change[0] != solved.partition(" ")[0]]
        names = arm.name + suffix, arm.on + suffix
        every = (*changes, *trained)
        yield Arm(*names, spec, settings[arm.name], costs(spec, length), every, solved, ratio, group=arm.name, **run)


def _same_objective(design: LabDesign, arm: ArmDesign, *sides: tuple[Model, Mapping[str, Any]]) -> None:
    """Raise SpecError where an arm learns another task than the one it is compared with, and the metric is of that task."""
    if design.outside is not None or design.metric in PROBED:
        return
    there, here = (objective_kind(spec, reads_of(design.data), train.get("objective")) for spec, train in sides)
    if here is not there:
        problem = f"is trained by {here.name} and {arm.on} by {there.name}, whose {design.metric} is of another task"
        remedy = "give both the same masks (a window alone is not causal), or one `train: {objective: …}`"
        raise SpecError(f"arms.{arm.name}", problem, remedy)


def training_length(design: LabDesign) -> int:
    """Tokens per sequence of the runs: FLOPs and decode state are counted at this length."""
    return int(design.train.get("length", 128))


def costs(spec: Model, length: int) -> ArmCosts:
    """Count what a model costs."""
    return ArmCosts(parameters(spec), BUDGETS["flops"](spec, length), Account(spec, length, "bf16").state_bytes(length))


def matched(arm: ArmDesign, base: Model, spec: Model, match: str, length: int) -> tuple[Model, str]:
    """Return the arm's spec with the cost of the base, and the field that was changed for it."""
    by = MATCHES[match]
    target, now = BUDGETS[by](base, length), BUDGETS[by](spec, length)
    if arm.vary is None and abs(now - target) <= TOLERANCE * target:
        return spec, ""
    may_vary = _unchanged(base, spec)
    found = [one for one in match_budget(base, spec, by, length, arm.vary) if arm.vary is not None or may_vary(one.path)]
    within = sorted((one for one in found if one.distance(target) <= TOLERANCE), key=lambda one: one.path == "width")
    if within:
        return within[0].spec, f"{within[0].path} {within[0].old:,} → {within[0].value:,}"
    near = min(found, key=lambda one: one.distance(target), default=None)
    nearest = "" if near is None else f"; the nearest is {near.path}={near.value}, {near.distance(target):.1%} away"
    problem = f"no field outside its changes brings {match} within {TOLERANCE:.0%} of the base"
    problem += f" ({now:,.0f}, not {target:,.0f}){nearest}"
    raise SpecError(f"arms.{arm.name}", problem, "name a field with `vary`, change the arm, or leave `match` out")


def run_settings(train: Mapping[str, Any], budget: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of the runs of an arm, without its spec, data, seed and learning rate."""
    return {**train, **budget, "sample": 0, "keep": 1}


def _unchanged(base: Model, spec: Model) -> Callable[[str], bool]:
    """Whether a field, by its pattern, is of a part that the arm does not change."""
    touched = {_branch(change.path) for change in diff(base, spec).change}
    return lambda path: _branch(path) not in touched


def _branch(path: str) -> str:
    """The branch of a block that a path is in, whatever the layer: `layers.*.mixer` of layers.3.mixer.kv_heads."""
    names = path.split(".")
    return f"layers.*.{names[2]}" if names[0] == "layers" and len(names) > 2 else names[0]
