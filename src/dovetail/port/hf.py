"""To Hugging Face's names and back: specs <-> configs, our tensors <-> theirs, bit for bit.

    config, moves = to_hf(spec)[1:]            their config.json as a dict, and which tensor goes where
    spec = from_hf(config)                     every field known or an error
    theirs = export_tensors(spec, ours)        ours = import_tensors(spec, theirs)

What a dialect cannot say is an error with the path of the part that it has no word for.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from dovetail import parts as _registered  # noqa: F401  every kind must be known before a config is read
from dovetail.core.check import check
from dovetail.core.errors import FileError, SpecError
from dovetail.core.fold import declared
from dovetail.core.part import Part, field_types, from_data, join, walk
from dovetail.model import Model
from dovetail.port.convert import Convert
from dovetail.port.dialect import DIALECTS
from dovetail.port.rotary import LENGTH, USUAL_LENGTH
from dovetail.port.table import Config, Dialect

MOST_LAYERS = 10_000
# a null in one of these fields stands for the size of the axis
STANDS_FOR = {"kv_heads": "kv_heads", "head": "head", "hidden": "ffn"}


class Move(NamedTuple):
    """Tensors of ours that lie in one of theirs, and how."""

    ours: tuple[str, ...]
    theirs: str
    convert: Convert


class Ported(NamedTuple):
    """A spec in another's words."""

    dialect: str
    config: dict[str, Any]
    moves: list[Move]


class Lost(NamedTuple):
    """What a dialect cannot say of a spec: where, what, and what it would be there."""

    path: str
    ours: Any
    remedy: str


# -- specs ----------------------------------------------------------------------------------------------------------


def to_hf(spec: Model, name: str | None = None, *, length: int | None = None) -> Ported:
    """The config and the moves of the tensors, in the dialect called `name` or the first that can say all of the spec.
    `length` is the greatest length written for models that have none of their own. Raises SpecError with the path of the part
    that cannot be written."""
    check(spec)
    tried = [_attempt(spec, dialect, length) for dialect in _chosen(name)]
    for dialect, config, found in tried:
        if not found:
            return Ported(dialect.name, config, list(_moves(spec, dialect)))
    dialect, _, found = min(tried, key=lambda attempt: len(attempt[2]))
    first = found[0]
    raise SpecError(first.path, f"{_say(first.ours)} cannot be written as {dialect.name}", first.remedy)


def from_hf(config: Config) -> Model:
    """The spec a config describes. Raises SpecError for a family, a field or a value that is not known."""
    if not isinstance(config, Mapping):
        raise SpecError("config", f"a mapping was expected, not {type(config).__name__}")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in DIALECTS:
        raise SpecError("config.model_type", f"{name!r} is not known", f"known: {', '.join(DIALECTS)}")
    dialect = DIALECTS[name]
    known = {dialect.layers, *dialect.fixed, *dialect.ignored, *(n for field in dialect.fields for n in field.names)}
    for field in config:
        if field not in known:
            raise SpecError(f"config.{field}", f"is a field that {name} does not have here", "it may change what is computed")
    for field, only in dialect.fixed.items():
        if config.get(field, only) not in (only, None):
            raise SpecError(f"config.{field}", f"{config[field]!r} is not read", f"only {only!r} is")
    for field in dialect.required:
        if config.get(field) is None:
            raise SpecError(f"config.{field}", "is missing")
    spec = _read(config, dialect)
    check(spec)
    return spec


def expressible(spec: Model) -> str | None:
    """The name of the first dialect that can say all of this spec; None where there is none."""
    try:
        return to_hf(spec).dialect
    except SpecError:
        return None


def _chosen(name: str | None) -> list[Dialect]:
    if name is None:
        return list(DIALECTS.values())
    if name not in DIALECTS:
        raise SpecError("", f"no dialect is called {name!r}", f"dialects: {', '.join(DIALECTS)}")
    return [DIALECTS[name]]


def _attempt(spec: Model, dialect: Dialect, length: int | None) -> tuple[Dialect, dict[str, Any], list[Lost]]:
    """The config a dialect can write, and all that is lost in it: what differs when it is read again."""
    told = explicit(spec)
    config: dict[str, Any] = {
        "model_type": dialect.name,
        "architectures": [dialect.architecture],
        dialect.layers: len(spec.layers),
        **dialect.fixed,
    }
    names: set[str] = set()
    for field in dialect.fields:
        config |= field.give(told)
        names |= set(field.names)
    if LENGTH in names:
        config.setdefault(LENGTH, length or USUAL_LENGTH)
    # first weights are no part of what a model computes
    back = explicit(dc.replace(_read(config, dialect), init=spec.init))
    lost = [Lost(path, ours, f"there it is {_say(theirs)}") for path, ours, theirs in differences(told, back)]
    lost += [Lost(*hit) for limit in dialect.limits if (hit := limit(spec)) is not None]
    return dialect, config, lost


def _read(config: Config, dialect: Dialect) -> Model:
    """The spec of a config whose fields are all known; what it leaves out is as the dialect has it."""
    spec: Model = from_data(dialect.spec, Model)
    count = config[dialect.layers]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_LAYERS:
        raise SpecError(f"config.{dialect.layers}", f"{count!r} is not a whole number from 1 to {MOST_LAYERS}")
    for field in dialect.fields:
        for pattern, value in field.take(config).items():
            try:
                spec = spec.set(pattern, value)
            except SpecError as error:
                said = ", ".join(name for name in field.names if name in config)
                raise SpecError(f"config.{said}", error.problem, error.remedy) from error
    return dc.replace(spec, layers=spec.layers * count)


def explicit(spec: Model) -> Model:
    """The spec with every size written out that a null stands for, and lists of equal factors as one factor."""
    told: dict[str, dict[str, Any]] = {}
    for path, part, env in walk(spec):
        hints = field_types(type(part))
        for field, axis in STANDS_FOR.items():
            if hints.get(field) == int | None and getattr(part, field) is None:
                told.setdefault(path, {})[field] = env.size(axis)
        for name, below in part.parts().items():
            for field in dc.fields(below):
                value = getattr(below, field.name)
                if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1 and isinstance(value[0], float):
                    told.setdefault(join(path, name), {})[field.name] = value[:1]
    return _rewritten(spec, told, "")


def _rewritten(value: Any, told: Mapping[str, dict[str, Any]], path: str) -> Any:
    """The tree with other fields at these paths, in one pass."""
    if isinstance(value, tuple):
        return tuple(_rewritten(item, told, join(path, str(i))) for i, item in enumerate(value))
    if not isinstance(value, Part):
        return value
    fields = {f.name: _rewritten(getattr(value, f.name), told, join(path, f.name)) for f in dc.fields(value)}
    return dc.replace(value, **{**fields, **told.get(path, {})})


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value of the first, value of the second) wherever two specs part."""
    if isinstance(ours, Part) and type(ours) is type(theirs):
        for field in dc.fields(ours):
            yield from differences(getattr(ours, field.name), getattr(theirs, field.name), join(path, field.name))
    elif (
        isinstance(ours, tuple)
        and isinstance(theirs, tuple)
        and len(ours) == len(theirs)
        and ours
        and isinstance(ours[0], Part)
    ):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, join(path, str(i)))
    elif ours != theirs:
        yield path, ours, theirs


def _say(value: Any) -> str:
    return value.kind if isinstance(value, Part) else "nothing" if value is None else str(value)


# -- tensors --------------------------------------------------------------------------------------------------------


def export_tensors(spec: Model, tensors: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Our tensors under their names and in their layout; tied ones once. Every tensor of the spec must be there, no other."""
    shapes = _shapes(spec)
    for path in tensors:
        if path not in shapes and path not in _ties(spec):
            raise FileError(f"{path}: is no tensor of this spec")
    for path, shape in shapes.items():
        if path not in tensors:
            raise FileError(f"{path}: is missing")
        _fits(path, tensors[path], shape)
    moves = to_hf(spec, name).moves
    return {move.theirs: move.convert.there([tensors[path] for path in move.ours]) for move in moves}


def import_tensors(spec: Model, theirs: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout. One that is missing, unknown, of another shape, or tied and yet
    different is an error."""
    dialect = DIALECTS[to_hf(spec, name).dialect]
    shapes, left, ours = _shapes(spec), dict(theirs), {}
    for move in _moves(spec, dialect):
        if move.theirs not in left:
            raise FileError(f"{move.theirs}: is missing")
        wanted = [shapes[path] for path in move.ours]
        found = move.convert.back(left.pop(move.theirs), wanted)
        if len(found) != len(wanted):
            raise FileError(f"{move.theirs}: has shape {tuple(theirs[move.theirs].shape)}, which does not hold {wanted}")
        for path, tensor, shape in zip(move.ours, found, wanted, strict=True):
            _fits(move.theirs, tensor, shape)
            ours[path] = tensor
    _drop_ties(spec, dialect, left, ours)
    for extra in left:
        if not any(fnmatchcase(extra, pattern) for pattern in dialect.stale):
            raise FileError(f"{extra}: has no place in this spec")
    return ours


def _moves(spec: Model, dialect: Dialect) -> Iterator[Move]:
    """The table's rows for every layer, as far as the spec has their tensors."""
    shapes = _shapes(spec)
    for row in dialect.tensors:
        for layer in range(len(spec.layers) if "{}" in row.theirs else 1):
            ours = tuple(path.format(layer) for path in row.ours)
            if all(path in shapes for path in ours):
                yield Move(ours, row.theirs.format(layer), row.convert)


def _drop_ties(spec: Model, dialect: Dialect, left: dict[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    """A tied tensor may be there a second time, if it is really the same."""
    for alias, owner in _ties(spec).items():
        for row in dialect.tensors:
            if row.ours == (alias,) and row.theirs in left:
                copy = left.pop(row.theirs)
                if copy.shape != ours[owner].shape or not copy.equal(ours[owner]):
                    raise FileError(f"{row.theirs}: is tied to the embedding by the config, yet holds other numbers")


def _shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    return {d.path: d.weight.shape(d.env) for d in declared(spec) if d.weight.learned}


def _ties(spec: Model) -> dict[str, str]:
    return {d.path: d.weight.same_as for d in declared(spec) if d.weight.same_as is not None}


def _fits(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise FileError(f"{name}: has shape {tuple(tensor.shape)}, not {shape}")
