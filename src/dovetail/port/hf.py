"""To Hugging Face's names and back: specs <-> configs, our tensors <-> theirs, bit for bit.

    ported = to_hf(spec)                       their config.json as a dict, their class, and which tensor goes where
    spec = from_hf(config)                     every field known or an error
    theirs = export_tensors(spec, ours)        ours = import_tensors(spec, theirs)

What a dialect cannot say is an error with the path of the part that it has no word for.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from dovetail import parts as _registered  # noqa: F401  every kind must be known before a config is read
from dovetail.core.check import check
from dovetail.core.errors import FileError, SpecError
from dovetail.core.fold import declared
from dovetail.core.part import Part, field_types, from_data, join, walk
from dovetail.model import Block, Model
from dovetail.port.convert import Convert
from dovetail.port.dialect import DIALECTS
from dovetail.port.rotary import LENGTH, USUAL_LENGTH
from dovetail.port.table import ABSENT, Config, Dialect, Field, Form, Row, look, numbered

MOST_LAYERS = 2_000  # the deepest known has 1,000; what a spec of so many takes is some megabytes
# a null in one of these fields stands for the size of the axes, the first of several that the part has
STANDS_FOR = {
    "kv_heads": (("kv_heads",),),
    "head": (("head",),),
    "hidden": (("ffn",),),
    "inner": (("inner",), ("heads", "head")),
    "rank": (("rank",),),
    "key_heads": (("key_heads",),),
    "key_size": (("key",),),
    "value_size": (("value",),),
}


class Move(NamedTuple):
    """Tensors of ours that lie in some of theirs, and how."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    convert: Convert


class Ported(NamedTuple):
    """A spec in another's words."""

    dialect: str
    form: Form
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
    nearest: tuple[str, list[Lost]] | None = None
    told = explicit(spec)
    for dialect, form in _likely(spec, _chosen(name)):
        config, found = _attempt(spec, told, dialect, form, length)
        if not found:
            return Ported(dialect.name, form, config, list(_moves(spec, dialect, form)))
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


_USUAL: dict[tuple[str, str], tuple[Dialect, Model]] = {}


def _usual(dialect: Dialect, form: Form) -> Model:
    """The spec of a family with one layer, before any field of a config is read; made once."""
    key = (dialect.name, form.architecture)
    if key not in _USUAL or _USUAL[key][0] is not dialect:
        _USUAL[key] = dialect, from_data({**dialect.spec, **(form.head or {})}, Model)
    return _USUAL[key][1]


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


def explicit(spec: Model) -> Model:
    """The spec with every size written out that a null stands for, and lists of equal factors as one factor."""
    told: dict[str, dict[str, Any]] = {}
    for path, part, env in walk(spec):
        hints = field_types(type(part))
        for field, choices in STANDS_FOR.items():
            if hints.get(field) == int | None and getattr(part, field) is None:
                axes = next(axes for axes in choices if set(axes) <= env.sizes.keys())
                told.setdefault(path, {})[field] = env.size(*axes)
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
    theirs: dict[str, Tensor] = {}
    for move in to_hf(spec, name).moves:
        theirs |= zip(move.theirs, move.convert.there([tensors[path] for path in move.ours]), strict=True)
    return theirs


def import_tensors(spec: Model, theirs: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout. One that is missing, unknown, of another shape, or tied and yet
    different is an error."""
    ported = to_hf(spec, name)
    return dict(imported(spec, DIALECTS[ported.dialect], ported.form, theirs, theirs.__getitem__))


def imported(
    spec: Model, dialect: Dialect, form: Form, names: Collection[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, each of their `names` being read when its turn comes and no earlier; in the order of `names`."""
    shapes, ties = _shapes(spec), _ties(spec)
    written = {_of_now(name, dialect): name for name in names}
    moves, place = list(_moves(spec, dialect, form)), {name: i for i, name in enumerate(written)}
    moved = {one for move in moves for one in move.theirs}
    for one in moved:
        if one not in place:
            raise FileError(f"{one}: is missing")
    again = [(theirs, ties[row.ours[0]]) for theirs, row in _rows(dialect, form) if row.ours[0] in ties and theirs in place]
    for extra in set(written) - moved - {theirs for theirs, _ in again}:
        if not any(fnmatchcase(extra, pattern) for pattern in dialect.stale):
            raise FileError(f"{extra}: has no place in this spec")
    owners: dict[str, Tensor] = {}
    for move in sorted(moves, key=lambda move: min(place[one] for one in move.theirs)):
        for path, tensor in _home(move, [read(written[one]) for one in move.theirs], [shapes[path] for path in move.ours]):
            if path in ties.values():
                owners[path] = tensor
            yield path, tensor
    for theirs, owner in again:  # a tied tensor may be there a second time, if it is really the same
        copy = read(written[theirs])
        if copy.shape != owners[owner].shape or not copy.equal(owners[owner]):
            raise FileError(f"{theirs}: is tied to {owner} by the config, yet holds other numbers")


def _of_now(name: str, dialect: Dialect) -> str:
    """A tensor's name as it is written today."""
    return next((name.removesuffix(old) + new for old, new in dialect.older.items() if name.endswith(old)), name)


def _home(move: Move, theirs: list[Tensor], shapes: list[tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Ours of one move, held to their shapes."""
    first, given = move.theirs[0], tuple(theirs[0].shape)
    try:
        found = move.convert.back(theirs, shapes)
    except (RuntimeError, IndexError, ValueError) as error:  # a shape of too few dimensions, say
        raise FileError(f"{first}: has shape {given}, which does not hold {shapes}") from error
    theirs.clear()  # what was read is not kept beside what was made of it
    if len(found) != len(shapes):
        raise FileError(f"{first}: has shape {given}, which does not hold {shapes}")
    for path, shape in zip(move.ours, shapes, strict=True):
        _fits(first, found[0], shape)
        yield path, found.pop(0)


def _rows(dialect: Dialect, form: Form) -> Iterator[tuple[str, Row]]:
    """(their name with what stands before it, row) of the family's own tensors and of the form's."""
    yield from ((form.prefix + row.theirs, row) for row in dialect.tensors)
    yield from ((row.theirs, row) for row in form.tensors)


def _moves(spec: Model, dialect: Dialect, form: Form) -> Iterator[Move]:
    """The table's rows for every layer, as far as the spec has their tensors."""
    shapes, told = _shapes(spec), explicit(spec)
    depths = {"layers": len(spec.layers), "encoder": 0 if spec.encoder is None else len(spec.encoder.layers)}
    for theirs, row in _rows(dialect, form):
        for layer in range(depths[row.ours[0].partition(".")[0]] if "{}" in row.ours[0] else 1):
            ours = tuple(path.replace("{}", str(layer)) for path in row.ours)
            if all(path in shapes for path in ours) and row.stands(told, layer):
                names = numbered(theirs.replace("{}", str(layer)), shapes[ours[0]][0])
                yield Move(ours, names, row.conversion(told, layer))


def _shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    return {d.path: d.weight.shape(d.env) for d in declared(spec) if d.weight.stored}


def _ties(spec: Model) -> dict[str, str]:
    return {d.path: d.weight.same_as for d in declared(spec) if d.weight.same_as is not None}


def _fits(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise FileError(f"{name}: has shape {tuple(tensor.shape)}, not {shape}")
