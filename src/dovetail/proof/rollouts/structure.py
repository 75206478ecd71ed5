"""Structure: the sampler runs another architecture with the same weights, such as a wrong rope base.

A field of the spec takes its other values (field_candidates.py) in every layer that has the same value, as where a config is
misread: each is a model of ours with the trainer's weights. A number that helps without explaining all is fitted between its
neighbors. Only fields that a part declares as often mistaken are tried, and variants that need other weights are skipped.
"""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Callable, Iterator
from math import exp, log
from typing import Any

from dovetail.base.errors import DovetailError
from dovetail.hf.field import value_at
from dovetail.model.model import Model, ModelModule
from dovetail.nn.module import tensor_at
from dovetail.proof.compare.candidates import UNRUNNABLE, Candidate, with_tensors
from dovetail.proof.compare.field_candidates import field_candidates, layer_candidates, show
from dovetail.proof.rollouts.fit import golden_section
from dovetail.spec.fold import declared

OUTER = frozenset({"layers", "encoder", "init", "width", "vocab", "dropout", "mtp"})
FITTED, NEAREST = 14, 1e-3  # steps of golden section for a number; the relative distance at which it ends
MOST_FITTED = 3  # numbers that are fitted
PROMISING = 0.9  # a value that reduces the gap to this fraction is worth fitting


@dc.dataclass(frozen=True)
class Variant:
    """A changed spec: the name of the cause and its description, the field and its value."""

    cause: str
    description: str
    spec: Model
    path: str
    value: Any


Error = Callable[[ModelModule], float]


def variants(model: ModelModule) -> Iterator[Variant]:
    """Every spec with one field changed in all layers alike, by the mistakes that its parts declare."""
    spec = model.part
    for i, block in enumerate(spec.layers):
        if block in spec.layers[:i]:
            continue
        for one in layer_candidates(block, model.layers[i]):
            old, new = value_at(block, one.place), value_at(one.part, one.place)
            if one.cause != one.place:
                yield from _made(spec, f"layers.*.{one.place}", one, old, new)
    for one in field_candidates(spec, OUTER):
        if one.cause != one.place:
            yield from _made(spec, one.place, one, value_at(spec, one.place), value_at(one.part, one.place))


def _made(spec: Model, path: str, candidate: Candidate, old: Any, new: Any) -> Iterator[Variant]:
    try:
        changed = spec.replace(path, lambda value: new if value == old else value)
    except (DovetailError, TypeError, ValueError):
        return
    yield Variant(candidate.cause, candidate.description, changed, path, new)


@dc.dataclass(frozen=True)
class VariantFit:
    """The result: the best variant and its model, or None; how many were tried, and whether the time was enough."""

    variant: Variant | None
    model: ModelModule | None
    error: float
    tried: int
    complete: bool


def find_variant(model: ModelModule, error: Error, before: float, floor: float, seconds: float) -> VariantFit:
    """Search the variant that leaves least of a gap of size `before`; end at the first one that leaves at most `floor`."""
    end, best, tried = time.monotonic() + seconds, VariantFit(None, None, before, 0, True), 0
    distinct: dict[Model, Variant] = {}
    numbers: dict[str, VariantFit] = {}  # by field, the best value of a number
    for variant in variants(model):
        distinct.setdefault(variant.spec, variant)
    for variant in distinct.values():
        if time.monotonic() > end:
            return dc.replace(best, tried=tried, complete=False)
        found = _tried(model, variant, error)
        tried += found is not None
        if found is None:
            continue
        if isinstance(variant.value, float) and variant.value > 0 and found.error < PROMISING * before:
            numbers[variant.path] = min(numbers.get(variant.path, found), found, key=lambda one: one.error)
        if found.error < best.error:
            best = found
            if best.error <= floor:
                return dc.replace(best, tried=tried)
    for promising in sorted(numbers.values(), key=lambda number: number.error)[:MOST_FITTED]:
        if time.monotonic() < end:
            best = min(best, _fitted(model, promising, error), key=lambda one: one.error)
    return dc.replace(best, tried=tried)


def _tried(model: ModelModule, variant: Variant, error: Error) -> VariantFit | None:
    """The variant with the weights of the model; None where it needs others, or cannot run."""
    try:
        tensors = {d.path: tensor_at(model, d.path).detach() for d in declared(model.part) if d.weight.role != "const"}
        changed = with_tensors(variant.spec, tensors, model.dtype)
        return None if changed is None else VariantFit(variant, changed, error(changed), 0, True)
    except UNRUNNABLE:
        return None


def _fitted(model: ModelModule, best: VariantFit, error: Error) -> VariantFit:
    """The best value of a number, by golden section over its logarithm between the old value and beyond the best one."""
    variant = best.variant
    assert variant is not None
    old = value_at(model.part, variant.path)
    at = log(variant.value)
    reach = max(abs(at - log(old)) if isinstance(old, float) and old > 0 else 1.0, log(2.0))
    low, high = at - reach, at + reach

    def fit(x: float) -> VariantFit:
        value = exp(x)
        spec = model.part.replace(variant.path, lambda v: value if v == old else v)
        described = f"{variant.path.removeprefix('layers.*.')}: {show(value)} instead of {show(old)}"
        made = Variant(variant.cause, described, spec, variant.path, value)
        return _tried(model, made, error) or VariantFit(None, None, float("inf"), 0, True)

    return min((best, golden_section(fit, low, high, FITTED, NEAREST)), key=lambda one: one.error)
