"""To Hugging Face's names and back: specs <-> configs, our tensors <-> theirs, bit for bit.

    ported = to_hf(spec)                       their config.json as a dict, their class, and which tensor goes where
    spec = from_hf(config)                     every field known or an error
    theirs = export_tensors(spec, ours)        ours = import_tensors(spec, theirs)

What a dialect cannot say is an error with the path of the part that it has no word for.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dovetail import parts as _registered  # noqa: F401  every kind must be known before a config is read
from dovetail.core.check import check
from dovetail.core.errors import FileError, SpecError
from dovetail.core.part import Part, from_data
from dovetail.model import Block, Model
from dovetail.port import tensors
from dovetail.port.dialect import DIALECTS
from dovetail.port.explicit import differences, explicit
from dovetail.port.rotary import LENGTH, USUAL_LENGTH
from dovetail.port.table import ABSENT, Config, Dialect, Field, Form, look

MOST_LAYERS = 2_000  # the deepest known has 1,000; what a spec of so many takes is some megabytes


class Ported(NamedTuple):
    """A spec in another's words."""

    dialect: str
    form: Form
    config: dict[str, Any]
    moves: list[tensors.Move]


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
    nearest: tuple[str, list[Lost]] | None = None
    told = explicit(spec)
    for dialect, form in _likely(spec, _chosen(name)):
        config, found = _attempt(spec, told, dialect, form, length)
        if not found:
            return Ported(dialect.name, form, config, list(tensors.moves(spec, dialect, form)))
        if nearest is None or len(found) < len(nearest[1]):
            nearest = dialect.name, found
    assert nearest is not None
    first = nearest[1][0]
    raise SpecError(first.path, f"{_say(first.ours)} cannot be written as {nearest[0]}", first.remedy)


def from_hf(config: Config) -> Model:
    """The spec a config describes. Raises SpecError for a family, a field or a value that is not known."""
    if not isinstance(config, Mapping):
        raise SpecError("config", f"a mapping was expected, not {type(config).__name__}")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in DIALECTS:
        raise SpecError("config.model_type", f"{name!r} is not known", f"known: {', '.join(DIALECTS)}")
    dialect = DIALECTS[name]
    config, form = {**dialect.defaults, **config}, form_of(config, dialect)
    config |= {field: config[other] for field, other in dialect.like.items() if config.get(field) is None and other in config}
    fields = (*dialect.fields, *form.fields)
    known = {dialect.layers, dialect.encoder, *_fixed(dialect), *dialect.ignored, *(n for field in fields for n in field.names)}
    for field in config:
        if field not in known:
            raise SpecError(f"config.{field}", f"is a field that {name} does not have here", "it may change what is computed")
    for field, only in _fixed(dialect).items():
        if config.get(field, only) not in (only, None):
            raise SpecError(f"config.{field}", f"{config[field]!r} is not read", f"only {only!r} is")
    for field in (*dialect.required, *form.required):
        if config.get(field) is None:
            raise SpecError(f"config.{field}", "is missing")
    spec = _read(config, dialect, form)
    check(spec)
    return spec


def _fixed(dialect: Dialect) -> dict[str, Any]:
    """Fields that can have one value only."""
    return {"is_encoder_decoder": dialect.encoder is not None, **dialect.fixed}


def form_of(config: Config, dialect: Dialect) -> Form:
    """What a config says its model is made for; the family's first where it does not say."""
    said = config.get("architectures")
    if not said:
        return dialect.forms[0]
    names = [form.architecture for form in dialect.forms]
    if not isinstance(said, (list, tuple)) or len(said) != 1 or said[0] not in names:
        raise SpecError("config.architectures", f"{said!r} is not known", f"of {dialect.name}: {', '.join(names)}")
    return dialect.forms[names.index(said[0])]


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


def _likely(spec: Model, dialects: list[Dialect]) -> list[tuple[Dialect, Form]]:
    """The forms that are as near as any by what no config changes: the embedding, the head, whether there is an encoder."""
    forms = [(dialect, form) for dialect in dialects for form in dialect.forms]
    own = _around(spec)
    equal = [sum(a == b for a, b in zip(own, _around(_usual(*pair)), strict=True)) for pair in forms]
    return [pair for pair, count in zip(forms, equal, strict=True) if count == max(equal)]


def _around(spec: Model) -> tuple[type, type, bool]:
    return type(spec.embed), type(spec.head), spec.encoder is None


@functools.cache
def _usual(dialect: Dialect, form: Form) -> Model:
    """The spec of a family with one layer, before any field of a config is read."""
    return from_data({**dialect.spec, **(form.head or {})}, Model)


def _attempt(spec: Model, told: Model, dialect: Dialect, form: Form, length: int | None) -> tuple[dict[str, Any], list[Lost]]:
    """The config a dialect can write, and all that is lost in it: what differs when it is read again. `told` is the spec with
    nothing left unsaid."""
    config: dict[str, Any] = {
        "model_type": dialect.name,
        "architectures": [form.architecture],
        dialect.layers: len(spec.layers),
        **_fixed(dialect),
    }
    if dialect.encoder is not None:
        config[dialect.encoder] = 0 if spec.encoder is None else len(spec.encoder.layers)
    names: set[str] = set()
    for field in (*dialect.fields, *form.fields):
        config |= field.give(told)
        names |= set(field.names)
    if LENGTH in names:
        config.setdefault(LENGTH, length or USUAL_LENGTH)
    try:
        read = _read(config, dialect, form)
    except SpecError:  # what was given makes no model in this family: then its usual one shows what is missing
        read = _deep(_usual(dialect, form), len(spec.layers), 1 if spec.encoder is None else len(spec.encoder.layers))
    # first weights are no part of what a model computes
    if read.encoder is not None and spec.encoder is not None:
        read = dc.replace(read, encoder=dc.replace(read.encoder, init=spec.encoder.init))
    back = explicit(dc.replace(read, init=spec.init))
    lost = [Lost(path, ours, f"there it is {_say(theirs)}") for path, ours, theirs in differences(told, back)]
    lost += [Lost(*hit) for limit in dialect.limits if (hit := limit(spec)) is not None]
    return config, lost


def _read(config: Config, dialect: Dialect, form: Form) -> Model:
    """The spec of a config whose fields are all known; what it leaves out is as the dialect has it."""
    spec = _usual(dialect, form)
    said = [(field, *setting) for field in (*dialect.fields, *form.fields) for setting in field.take(config).items()]
    spec = _settled(spec, config, said, AROUND)
    spec = _deep(spec, _count(config, dialect.layers), 1 if dialect.encoder is None else _count(config, dialect.encoder))
    for reach in (PLACED, EVERY, ONE, OF_A_KIND):
        spec = _settled(spec, config, said, reach)
    return spec


# what a setting is about, in the order they are made: what is no layer, which part stands in a layer, every layer, one layer,
# those layers whose part is of some kind
AROUND, PLACED, EVERY, ONE, OF_A_KIND = range(5)


def _reach(path: str) -> int:
    names = path.split(".")
    if names[0] != "layers":
        return ONE if any(name.isdigit() for name in names[:3]) else AROUND
    if names[1].isdigit():
        return PLACED if len(names) == 3 else ONE
    return OF_A_KIND if ":" in path else EVERY


def _deep(spec: Model, layers: int, encoder: int) -> Model:
    """A spec of one layer with so many, and so many in its encoder where it has one."""
    below = None if spec.encoder is None else _deep(spec.encoder, encoder, 1)
    return dc.replace(spec, layers=spec.layers * layers, encoder=below)


def _count(config: Config, field: str) -> int:
    count = config.get(field)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_LAYERS:
        raise SpecError(f"config.{field}", f"{count!r} is not a whole number from 1 to {MOST_LAYERS}")
    return count


def _settled(spec: Model, config: Config, said: Sequence[tuple[Field, str, Any]], reach: int) -> Model:
    """The spec with all that was said with this reach."""
    layers = list(spec.layers)
    for field, pattern, value in said:
        if _reach(pattern) != reach:
            continue
        try:
            if pattern.startswith("layers."):
                _set_layers(layers, pattern, value)
            else:
                spec = spec.set(pattern, value)
        except SpecError as error:
            names = ", ".join(name for name in field.names if name in config)
            raise SpecError(f"config.{names}", error.problem, error.remedy) from error
    met: dict[Block, Block] = {}
    return dc.replace(spec, layers=tuple(met.setdefault(layer, layer) for layer in layers))  # equal layers are one


def _set_layers(layers: list[Block], pattern: str, value: Any) -> None:
    """One field set in one layer, in every layer that has it, or in those whose part is of the kind that is named:
    `layers.3.ffn`, `layers.*.norm.eps`, `layers.*.mixer:attention.heads`."""
    _, which, inside = pattern.split(".", 2)
    field = ".".join(name.partition(":")[0] for name in inside.split("."))
    having: dict[int, bool] = {}  # equal layers are one object, asked and changed once
    made: dict[int, Block] = {}
    for i in range(len(layers)) if which == "*" else [int(which)]:
        layer = layers[i]
        if id(layer) not in made:
            having[id(layer)] = look(layer, inside) is not ABSENT
            made[id(layer)] = layer.set(field, value) if having[id(layer)] else layer
        layers[i] = made[id(layer)]
    if ":" not in inside and not any(having.values()):
        raise SpecError(pattern, "no layer has such a field")


def _say(value: Any) -> str:
    return value.kind if isinstance(value, Part) else "nothing" if value is None else str(value)


# -- tensors --------------------------------------------------------------------------------------------------------


def export_tensors(spec: Model, ours: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Our tensors under their names and in their layout; tied ones once. Every tensor of the spec must be there, no other."""
    shapes = tensors.shapes_of(spec)
    for path in ours:
        if path not in shapes and path not in tensors.ties_of(spec):
            raise FileError(f"{path}: is no tensor of this spec")
    for path, shape in shapes.items():
        if path not in ours:
            raise FileError(f"{path}: is missing")
        tensors.fits(path, ours[path], shape)
    theirs: dict[str, Tensor] = {}
    for move in to_hf(spec, name).moves:
        theirs |= zip(move.theirs, move.convert.there([ours[path] for path in move.ours]), strict=True)
    return theirs


def import_tensors(spec: Model, theirs: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout. One that is missing, unknown, of another shape, or tied and yet
    different is an error."""
    ported = to_hf(spec, name)
    return dict(tensors.imported(spec, DIALECTS[ported.dialect], ported.form, theirs, theirs.__getitem__))
