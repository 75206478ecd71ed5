"""Two specs of equal budget: the value of one field of B at which B costs what A costs.

    params    parameters
    flops     FLOPs per token of a forward pass at a length: matmuls, and attention over the pairs that masks leave
    kv        bytes of decode state after a length

Fields are the whole numbers in the layers of B, one value for all layers that have the field, and the width. The cost grows
with the field, so that secants find the value; the legal value next to it is taken. Of the fields that reach A's cost within
the tolerance, the one that changes least is taken.
"""

from __future__ import annotations

import dataclasses as dc
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dovetail.account import Account
from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.spec.check import check
from dovetail.spec.field import number_type
from dovetail.spec.fold import parameters
from dovetail.spec.part import field_types, join, walk_spec

TOLERANCE = 0.01
SECANTS = 12  # steps of the search
NEAR = 64  # values around the one that is searched, of which the nearest legal one is taken
ROUND = (256, 128, 64, 32, 16, 8)  # multiples of which one is taken where it is within the tolerance: kernels like them
RANGE = 64  # a value is changed by at most this factor


class Found(NamedTuple):
    """A value of a field, and what the spec then costs."""

    path: str
    old: int
    value: int
    cost: float
    spec: Model

    def distance(self, target: float) -> float:
        """How far the cost is from a target, as a fraction of it."""
        return abs(self.cost - target) / target

    @property
    def change(self) -> float:
        """How far the value is from the old one: |log(value / old)|."""
        return abs(math.log(self.value / self.old))


def _flops(spec: Model, length: int) -> float:
    work = Account(spec, length, "bf16").flops_per_token
    return work["matmul"] + work["attention_causal"]


BUDGETS: Mapping[str, Callable[[Model, int], float]] = {
    "params": lambda spec, length: parameters(spec),
    "flops": _flops,
    "kv": lambda spec, length: Account(spec, length, "bf16").state_bytes(length),
}


def candidates(spec: Model) -> dict[str, int]:
    """Pattern -> value of every field that may be changed: whole numbers above 0 that all layers which have them share."""
    found: dict[str, set[int]] = {}
    for path, part in walk_spec(spec):
        if not path.startswith("layers."):
            continue
        hints = field_types(type(part))
        for field in dc.fields(part):
            value = getattr(part, field.name)
            if number_type(hints[field.name]) is int and type(value) is int and value > 0:
                found.setdefault(re.sub(r"^layers\.\d+", "layers.*", join(path, field.name)), set()).add(value)
    shared = {pattern: values.pop() for pattern, values in found.items() if len(values) == 1}
    return {**shared, "width": spec.width}  # last: of two equal changes, that of the layers is taken


def fit(spec: Model, pattern: str, old: int, budget: Callable[[Model], float], target: float) -> Found | None:
    """The legal value of a field whose cost is nearest to the target, a round one where it is near enough; None where the field
    has no influence on the cost."""
    tried: dict[int, Found | None] = {}

    def at(value: int) -> Found | None:
        """The spec with this value; None where it is not legal."""
        if value not in tried:
            try:
                changed = spec.set(pattern, value)
                check(changed)
                tried[value] = Found(pattern, old, value, budget(changed), changed)
            except SpecError:
                tried[value] = None
        return tried[value]

    def near(value: float) -> Found | None:
        """The legal value nearest to a number."""
        middle = min(max(round(value), max(1, old // RANGE)), old * RANGE)
        around = sorted(range(max(1, middle - NEAR), middle + NEAR + 1), key=lambda one: abs(one - value))
        return next((found for one in around if (found := at(one)) is not None), None)

    low, high = near(old), near(2 * old)
    if low is None or high is None or low.value == high.value or low.cost == high.cost:
        return None
    for _ in range(SECANTS):
        step = (target - high.cost) * (high.value - low.value) / (high.cost - low.cost)
        following = near(high.value + step)
        if following is None or following.value in (low.value, high.value) or following.cost == high.cost:
            break
        low, high = high, following
    best = min((found for found in tried.values() if found is not None), key=lambda found: found.distance(target))
    rounded = (at(multiple * round(best.value / multiple)) for multiple in ROUND)
    return next((found for found in rounded if found is not None and found.distance(target) <= TOLERANCE), best)


def match_budget(a: Model, b: Model, by: str, length: int, vary: str | None = None) -> list[Found]:
    """The fields of B with the values that bring its cost nearest to that of A (`match_cost`)."""

    def budget(spec: Model) -> float:
        return BUDGETS[by](spec, length)

    return match_cost(b, budget, budget(a), vary)


def match_cost(b: Model, budget: Callable[[Model], float], target: float, vary: str | None = None) -> list[Found]:
    """The fields of B with the values that bring its cost nearest to a target: those within the tolerance first, the smallest
    change first, then the others, the nearest first. `vary` is the pattern of the one field to change."""
    fields = candidates(b)
    if vary is not None:
        if vary not in fields:
            known = ", ".join(sorted(fields))
            raise SpecError(vary, "is not a whole number that all layers of B share", f"choose one of {known}")
        fields = {vary: fields[vary]}
    found = [one for pattern, old in fields.items() if (one := fit(b, pattern, old, budget, target)) and one.value != old]
    within = sorted((one for one in found if one.distance(target) <= TOLERANCE), key=lambda one: one.change)
    beyond = sorted((one for one in found if one.distance(target) > TOLERANCE), key=lambda one: one.distance(target))
    return [*within, *beyond]
