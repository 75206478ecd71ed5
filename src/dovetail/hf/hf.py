"""Convert specs to Hugging Face configs and back, and tensors likewise, bit for bit.

    ported = to_hf(spec)                              config.json as a dict, the model class, and where each tensor goes
    spec = from_hf(config)                            an unknown field is an error
    hf_tensors = export_tensors(spec, tensors)        tensors = import_tensors(spec, hf_tensors)

A spec that no dialect can express is an error with the path of the first part that cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from dovetail import parts as _registered  # noqa: F401  every kind must be known before a config is read
from dovetail.base.errors import FileError, SpecError
from dovetail.hf import tensors
from dovetail.hf.config import base_spec, read_config, with_depth
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.field import Config
from dovetail.hf.resolved import differences, explicit, untrained
from dovetail.hf.rotary import DEFAULT_LENGTH, LENGTH
from dovetail.hf.table import UNUSED, Dialect, Form
from dovetail.model.model import Model
from dovetail.spec.check import check
from dovetail.spec.part import Part


class Ported(NamedTuple):
    """A spec in Hugging Face's terms: its config, and where each tensor goes."""

    dialect: str
    form: Form
    config: dict[str, Any]
    moves: list[tensors.Move]


class Unsupported(NamedTuple):
    """A value of a spec that a dialect cannot express: its path, the value, and what it would become."""

    path: str
    value: Any
    remedy: str


# -- specs ----------------------------------------------------------------------------------------------------------


def to_hf(spec: Model, name: str | None = None, *, length: int | None = None) -> Ported:
    """The config and the moves of the tensors, in the dialect called `name` or the first that can express the spec. `length`
    is the max_position_embeddings of a model that has no greatest length. Raises SpecError with the path of the part that
    cannot be written."""
    check(spec)
    nearest: tuple[str, list[Unsupported]] | None = None
    sizes = explicit(spec)
    for dialect, form in _likely(spec, _chosen(name)):
        config, unsupported = attempt(spec, dialect, form, length, sizes)
        if not unsupported:
            moves = [*tensors.moves(spec, dialect, form), *tensors.copies_ahead(spec, dialect)]
            return Ported(dialect.name, form, config, moves)
        if nearest is None or len(unsupported) < len(nearest[1]):
            nearest = dialect.name, unsupported
    assert nearest is not None
    first = nearest[1][0]
    raise SpecError(first.path, f"{_shown(first.value)} cannot be written as {nearest[0]}", first.remedy)


def from_hf(config: Config, dialect: Dialect | None = None) -> Model:
    """The spec a config describes, in the dialect of its model_type unless one is given. Raises SpecError for an unknown
    family, field or value."""
    if not isinstance(config, Mapping):
        raise SpecError("config", f"a mapping was expected, not {type(config).__name__}")
    dialect = dialect or _dialect_of(config)
    config, form = {**dialect.defaults, **_renamed(config, dialect)}, form_of(config, dialect)
    for field, other in dialect.fallbacks.items():
        if config.get(field) is None and (callable(other) or other in config):
            config[field] = other(config) if callable(other) else config[other]
    fields = (*dialect.fields, *form.fields)
    known = {dialect.layers, dialect.encoder, *UNUSED, *_fixed(dialect), *dialect.reset, *dialect.ignored}
    known |= set() if dialect.ahead is None else {dialect.ahead.count}
    known |= {name for field in fields for name in field.names}
    for field in config:
        if field not in known:
            raise SpecError(
                f"config.{field}", f"is not a known field of {dialect.name}", "it may change what the model computes"
            )
    for field, only in {**UNUSED, **_fixed(dialect)}.items():
        if config.get(field, only) not in (only, None):
            raise SpecError(f"config.{field}", f"{config[field]!r} is unsupported", f"supported: {only!r}")
    for field in config.keys() - dialect.ignored - dialect.infinite:
        if not _finite(config[field]):
            raise SpecError(f"config.{field}", f"{str(config[field])[:60]} is not finite")
    for field in (*dialect.required, *form.required):
        if config.get(field) is None:
            raise SpecError(f"config.{field}", "is missing")
    spec = read_config(config, dialect, form)
    check(spec)
    return spec


def _finite(value: Any) -> bool:
    """Whether a value of a config holds no NaN and no infinity."""
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    return not isinstance(value, float) or isfinite(value)


def _renamed(config: Config, dialect: Dialect) -> dict[str, Any]:
    """The config with older names of fields replaced by the present ones. Two names with different values are an error."""
    renamed = {field: value for field, value in config.items() if field not in dialect.aliases}
    for old, new in dialect.aliases.items():
        value = config.get(old)
        if value is not None and renamed.get(new) is not None and renamed[new] != value:
            raise SpecError(f"config.{old}", f"is {value!r}, but config.{new} is {renamed[new]!r}", "the two must agree")
        renamed |= {} if value is None else {new: value}
    return renamed


def _fixed(dialect: Dialect) -> dict[str, Any]:
    """Fields that can have one value only."""
    return {"is_encoder_decoder": dialect.encoder is not None, **dialect.fixed}


def _dialect_of(config: Config) -> Dialect:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in DIALECTS:
        raise SpecError("config.model_type", f"{name!r} is not a known family", f"known: {', '.join(DIALECTS)}")
    return DIALECTS[name]


def form_of(config: Config, dialect: Dialect) -> Form:
    """The model class that a config names; the family's first where it names none."""
    listed = config.get("architectures")
    if not listed:
        return dialect.forms[0]
    names = [form.architecture for form in dialect.forms]
    if not isinstance(listed, (list, tuple)) or len(listed) != 1 or listed[0] not in names:
        reasons = [why for name, why in dialect.refused.items() if listed == [name]]
        raise SpecError("config.architectures", f"{listed!r} is unsupported", *(reasons or [f"supported: {', '.join(names)}"]))
    return dialect.forms[names.index(listed[0])]


def _chosen(name: str | None) -> list[Dialect]:
    if name is None:
        return list(DIALECTS.values())
    if name not in DIALECTS:
        raise SpecError("", f"no dialect is called {name!r}", f"dialects: {', '.join(DIALECTS)}")
    return [DIALECTS[name]]


def _likely(spec: Model, dialects: list[Dialect]) -> list[tuple[Dialect, Form]]:
    """The forms nearest to a spec in what no config changes: the embedding, the head, whether there is an encoder."""
    forms = [(dialect, form) for dialect in dialects for form in dialect.forms]
    own = _around(spec)
    equal = [sum(a == b for a, b in zip(own, _around(base_spec(*pair)), strict=True)) for pair in forms]
    return [pair for pair, count in zip(forms, equal, strict=True) if count == max(equal)]


def _around(spec: Model) -> tuple[type, type, bool]:
    return type(spec.embed), type(spec.head), spec.encoder is None


def attempt(
    spec: Model, dialect: Dialect, form: Form, length: int | None = None, sizes: Model | None = None
) -> tuple[dict[str, Any], list[Unsupported]]:
    """The config that a dialect writes for a spec, and every value that differs when that config is read again. `sizes` is the
    spec with every size written out."""
    sizes = sizes or explicit(spec)
    config: dict[str, Any] = {
        "model_type": dialect.name,
        "architectures": [form.architecture],
        dialect.layers: len(spec.layers),
        **_fixed(dialect),
        **dialect.reset,
    }
    if dialect.ahead is not None and (spec.mtp or dialect.ahead.default):
        config[dialect.ahead.count] = len(spec.mtp)
    if dialect.encoder is not None:
        config[dialect.encoder] = 0 if spec.encoder is None else len(spec.encoder.layers)
    names: set[str] = set()
    for field in (*dialect.fields, *form.fields):
        config |= field.to_hf(sizes)
        names |= set(field.names)
    if LENGTH in names:
        config.setdefault(LENGTH, length or DEFAULT_LENGTH)
    try:
        read = read_config(config, dialect, form)
    except SpecError:  # the config is invalid in this family: compare with the family's own spec instead
        read = with_depth(base_spec(dialect, form), len(spec.layers), 1 if spec.encoder is None else len(spec.encoder.layers))
    back = explicit(untrained(read, spec))
    unsupported = [Unsupported(path, ours, f"there it is {_shown(theirs)}") for path, ours, theirs in differences(sizes, back)]
    unsupported += [Unsupported(*hit) for limit in dialect.limits if (hit := limit(spec)) is not None]
    return config, unsupported


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
        return ", ".join(map(_shown, value))
    return value.kind if isinstance(value, Part) else "nothing" if value in (None, ()) else str(value)


# -- tensors --------------------------------------------------------------------------------------------------------


def export_tensors(spec: Model, own: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """Our tensors under the names and in the layout of Hugging Face; tied ones once. The names must be those of the spec."""
    shapes = tensors.shapes_of(spec)
    for path in own:
        if path not in shapes and path not in tensors.ties_of(spec):
            raise FileError(f"{path} is not a tensor of this spec")
    for path, shape in shapes.items():
        if path not in own:
            raise FileError(f"{path}: is missing")
        tensors.check_shape(path, own[path], shape)
    hf_tensors: dict[str, Tensor] = {}
    for move in to_hf(spec, name).moves:
        hf_tensors |= zip(move.hf_names, move.convert.to_hf([own[path] for path in move.paths]), strict=True)
    return hf_tensors


def import_tensors(spec: Model, hf_tensors: Mapping[str, Tensor], name: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint under our names and in our layout. A tensor that is missing, unknown, of another shape, or
    tied and yet different is an error; one that the dialect skips is a DroppedTensors warning."""
    ported = to_hf(spec, name)
    plan = tensors.ImportPlan(spec, DIALECTS[ported.dialect], ported.form, hf_tensors)
    tensors.warn_dropped(plan.dropped({one: tensor.nbytes for one, tensor in hf_tensors.items()}))
    return dict(plan.read(hf_tensors.__getitem__))
