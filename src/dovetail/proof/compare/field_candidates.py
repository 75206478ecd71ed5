"""Candidate bugs from fields: every field of every part takes its other values.

    flags turned, choices changed, another part of the same group, numbers near by or often confused (Proof.causes)

A field for which its part declares no mistake is tried all the same, from its type alone; the cause is then called by its path.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import types
import typing
from collections.abc import Iterator
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.nn.groups import WRONG_SCALING, Scaling
from dovetail.nn.module import Module
from dovetail.nn.softmax import SCORE_SCALE
from dovetail.proof.compare.candidates import Candidate
from dovetail.spec.part import KINDS, Part, field_types, join, walk_spec
from dovetail.spec.part_proof import cause_of
from dovetail.spec.scope import Scope

FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)  # by which a rope is often stretched


def field_candidates(part: Part, skip: frozenset[str] = frozenset()) -> Iterator[Candidate]:
    """Every field of a part and of all parts below it, with each of its other values."""
    for path, below in walk_spec(part):
        if path.split(".")[0] in skip:
            continue
        hints = field_types(type(below))
        for field in dc.fields(below):
            where, value = join(path, field.name), getattr(below, field.name)
            if where.split(".")[0] in skip:
                continue
            mistake = cause_of(below, field.name, where)
            for other in _other_values(value, hints[field.name], mistake.values):
                try:
                    changed = part.replace(where, other)
                except (SpecError, TypeError, ValueError):
                    continue
                description = f"{where}: {show(other)} instead of {show(value)}"
                yield Candidate(mistake.cause, where, description, changed)


def _other_values(value: Any, hint: Any, confused: tuple[Any, ...]) -> Iterator[Any]:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, bool):
        yield not value
        return
    if value is not None and type(None) in options:
        yield None
    yield from (other for other in confused if other != value)
    if isinstance(value, int):
        yield from (other for other in (value - 1, value + 1, value * 2, value // 2) if other > 0)
    elif isinstance(value, float):
        yield from (other for other in (value**2, abs(value) ** 0.5, 1 / value if value else 1.0) if other != value)
    elif isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], Part):  # one of several masks left out
        yield from (tuple(one for one in value if one is not dropped) for dropped in value)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            yield from (other for other in typing.get_args(option) if other != value)
        elif isinstance(option, type) and issubclass(option, Part):
            yield from _other_kinds(value if isinstance(value, Part) else None, option)


def _other_kinds(value: Part | None, group: type[Part]) -> Iterator[Part]:
    """Every other kind of a group, with the fields that both have unchanged."""
    for kind in KINDS.values():
        if not issubclass(kind, group) or type(value) is kind:
            continue
        shared = (
            {f.name: getattr(value, f.name) for f in dc.fields(value) if f.name in kind.__dataclass_fields__} if value else {}
        )
        try:
            yield kind(**shared)
        except (TypeError, SpecError):
            continue


def show(value: Any) -> str:
    """A value for people: parts by kind, numbers short."""
    if isinstance(value, Part):
        return value.kind
    if isinstance(value, tuple):
        return " & ".join(map(show, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def layer_candidates(block: Part, module: Module) -> Iterator[Candidate]:
    """Every candidate from the fields of a layer; `module` is its module."""
    mixer = module.modules_named("mixer")
    scope = module.scope if mixer is None else mixer.scope
    return itertools.chain(field_candidates(block), rope_stretches(block), score_scales(block, scope))


def score_scales(part: Part, scope: Scope) -> Iterator[Candidate]:
    """Attention scores divided by the root of another size, or by nothing; `scope` is the mixer's."""
    if "head" not in scope.sizes:
        return
    head, width = scope.sizes["head"], scope.sizes["embed"]
    scales = {
        "1/√width": width**-0.5,
        "1/head": 1 / head,
        "1/√head": head**-0.5,
        "√head": head**0.5,
        "1": 1.0,
        "1/head²": head**-2.0,
    }
    for path, below in walk_spec(part):
        for field in dc.fields(below):
            where = join(path, field.name)
            if cause_of(below, field.name, where) == SCORE_SCALE:
                for name, scale in scales.items():
                    yield Candidate(SCORE_SCALE.cause, where, f"{where}: {name}", part.replace(where, scale))


def rope_stretches(part: Part) -> Iterator[Candidate]:
    """A rope stretched by a plain factor, or without the amplitude of its scaling."""
    plain = [kind for kind in KINDS.values() if issubclass(kind, Scaling) and list(kind.__dataclass_fields__) == ["factor"]]
    for path, below in walk_spec(part):
        for name, hint in field_types(type(below)).items():
            if Scaling not in typing.get_args(hint):
                continue
            where, now = join(path, name), getattr(below, name)
            for kind, factor in itertools.product(plain, FACTORS):
                other = kind().replace("factor", factor)
                if other != now:
                    description = f"{where}: {other.kind} by {factor:g} instead of {show(now)}"
                    yield Candidate(WRONG_SCALING.cause, where, description, part.replace(where, other))
            if isinstance(now, Part) and "attention" in now.__dataclass_fields__:
                changed = part.replace(join(where, "attention"), 1.0)
                yield Candidate(WRONG_SCALING.cause, where, f"{where}: without its amplitude", changed)
