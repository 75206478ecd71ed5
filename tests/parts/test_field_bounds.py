"""Every number of every kind has a legal range: an impossible value is refused with its path, or the model is finite.

For each registered kind and each of its numeric fields a small spec with that kind is probed with NaN, infinities, negative
numbers, 0, and numbers far too large or too small.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import functools
import math
import random
from typing import Any

import pytest
import torch

from dovetail.base.errors import SpecError, StateError
from dovetail.data.tasks.task import SyntheticTask
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.nn.draws import Draws
from dovetail.nn.groups import Earlier
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.cover import all_factors, pins
from dovetail.proof.laws.sample import attempt
from dovetail.spec.check import check
from dovetail.spec.field import DEFAULT, Bounds, number_type
from dovetail.spec.fold import declared
from dovetail.spec.part import KINDS, field_types, walk_spec
from dovetail.weights.adapters.kind import AdapterKind

PROBES: tuple[float, ...] = (math.nan, math.inf, -math.inf, -1, 0, 1, 1e12, 10**12, 1e308, 2**31 - 1, 1e-300, 1e-30)
MAX_PARAMETERS = 10**6  # of a model that a probe builds
TRIES = 60
SEED = 0
DEPTH = 1  # layers

FIELDS = [
    (kind, name)
    for kind, cls in sorted(KINDS.items())
    if cls.__module__.startswith("dovetail.") and not issubclass(cls, AdapterKind | SyntheticTask)  # no parts of a spec
    for name, hint in field_types(cls).items()
    if number_type(hint) is not None
]
BOUNDS: dict[tuple[str, str], Bounds] = {
    (kind, field.name): field.metadata.get("bounds", DEFAULT[float])
    for kind in {kind for kind, _ in FIELDS}
    for field in dc.fields(KINDS[kind])
}


@functools.cache
def spec_with(kind: str) -> tuple[Model, str]:
    """A small legal spec with this kind, and the path of the part."""
    if issubclass(KINDS[kind], Earlier):
        spec = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 7}}]}")
        return spec.set("layers.1.mixer.earlier", kind), "layers.1.mixer.earlier"
    if issubclass(KINDS[kind], Block):
        return from_yaml(f"{{width: 28, vocab: 62, layers: [{{kind: {kind}, mixer: {{heads: 7}}}}]}}"), "layers.0"
    chance = random.Random(f"{kind} {SEED}")
    wanted = [factor for factor in all_factors() if factor.kind and factor.value == kind]
    for _ in range(TRIES):
        spec = attempt(chance, pins(chance.choice(wanted)) if wanted else {})
        if spec is None:
            continue
        short = dc.replace(spec, layers=spec.layers[:DEPTH])
        for path, part in walk_spec(short):
            if part.kind == kind and not path.startswith("encoder"):
                return short, path
    raise AssertionError(f"no sampled spec has the kind {kind}")


def probes(kind: str, field: str) -> list[Any]:
    """The values of the declared type and the limits of the field, in a tuple where the field is one."""
    number, bounds = number_type(field_types(KINDS[kind])[field]), BOUNDS[kind, field]
    limits = {number(limit) for limit in (bounds.at_least, bounds.at_most) if number and limit is not None}
    values = [value for value in PROBES if number is float or isinstance(value, int) or not math.isfinite(value)]
    values += sorted(limits - set(values))
    return [(value,) for value in values] if isinstance(getattr(KINDS[kind](), field), tuple) else values


def checked(spec: Model, path: str, value: Any) -> Model | SpecError:
    """The spec with this value at the path, or why it is refused."""
    try:
        probed = spec.replace(path, value)
        check(probed)
    except SpecError as error:
        return error
    return probed


@pytest.mark.quick(96)
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_an_impossible_number_is_refused_or_the_model_is_finite(kind: str, field: str) -> None:
    spec, path = spec_with(kind)
    here = f"{path}.{field}".lstrip(".")
    for value in probes(kind, field):
        probed = checked(spec, here, value)
        if isinstance(probed, SpecError):
            assert probed.path, f"{here} = {value}: {probed}"
            finite = math.isfinite(value[0] if isinstance(value, tuple) else value)
            assert finite or probed.path == here
        elif sum(d.size for d in declared(probed)) <= MAX_PARAMETERS:
            case = Case(probed, model=build(probed))
            # a table of positions that is too short for the input is an error of its own
            with torch.no_grad(), contextlib.suppress(StateError):
                assert case.run().isfinite().all(), f"{here} = {value}: the output is not finite"
                assert case.run(draws=Draws(1)).isfinite().all(), f"{here} = {value}: the output in training is not finite"


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_every_number_declares_its_bounds(kind: str, field: str) -> None:
    assert "bounds" in {f.name: f for f in dc.fields(KINDS[kind])}[field].metadata
