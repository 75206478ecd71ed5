"""Check a dialect itself, before any checkpoint is read with it.

For each model class of the family:
    its spec builds, with the parts and kinds it names
    every path that a field copies to exists, on the kind that is named
    no two fields set one path, and none replaces a part after another has set a field inside it
    the config written from the spec reads back as the same spec
    every tensor of the spec lies in exactly one tensor of the checkpoint

An error starts with the dialect's name and keeps our path.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

from dovetail.base.errors import SpecError
from dovetail.hf.config import OF_A_KIND, base_spec, settings_of, with_depth
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.field import ABSENT, Config, Copy, value_at
from dovetail.hf.hf import attempt, from_hf
from dovetail.hf.table import Dialect, Form
from dovetail.hf.tensors import moves
from dovetail.model.model import Model
from dovetail.spec.part import KINDS

DEPTH, ENCODER_DEPTH = 3, 2


def register(dialect: Dialect) -> None:
    """Check a dialect and make it known under its name; it is tried after those that are registered already."""
    if dialect.name in DIALECTS:
        raise SpecError(dialect.name, "a dialect of this name is registered already")
    check_dialect(dialect)
    DIALECTS[dialect.name] = dialect


def check_dialect(dialect: Dialect) -> None:
    """Raise SpecError where a dialect contradicts itself or names what does not exist."""
    for form in dialect.forms:
        try:
            spec = with_depth(base_spec(dialect, form), DEPTH, ENCODER_DEPTH)
            _check_paths(dialect, form, spec)
            config = written(dialect, form)
            _check_settings(config, dialect, form)
            read = from_hf(config, dialect)
            again, unsupported = attempt(read, dialect, form)
            for one in unsupported:
                raise SpecError(one.path, f"{one.value!r} is lost when it is written and read again")
            moves(read, dialect, form)
            if from_hf(again, dialect) != read:
                raise SpecError("", "the config that is written reads back as another spec")
        except SpecError as error:
            where = f"{dialect.name}, {form.architecture}" + (f": {error.path}" if error.path else "")
            raise SpecError(where, error.problem, error.remedy) from error


def written(dialect: Dialect, form: Form) -> dict[str, object]:
    """The config of the family's spec with a few layers."""
    spec = with_depth(base_spec(dialect, form), DEPTH, ENCODER_DEPTH)
    return attempt(spec, dialect, form)[0]


def _check_paths(dialect: Dialect, form: Form, spec: Model) -> None:
    """Every path of a copied field exists; of a kind that the spec does not have, at least the kind and its field."""
    for field in (*dialect.fields, *form.fields):
        for path in field.paths if isinstance(field, Copy) else ():
            for kind, name in _kinds(path):
                if kind not in KINDS:
                    raise SpecError(path, f"no part has the kind {kind!r}", f"set by config.{field.names[0]}")
                if name and name not in {f.name for f in dc.fields(KINDS[kind])}:
                    raise SpecError(path, f"{kind} has no field {name!r}", f"set by config.{field.names[0]}")
            if ":" not in path and value_at(spec, path) is ABSENT:
                raise SpecError(path, "the spec has no such field", f"set by config.{field.names[0]}")


def _kinds(path: str) -> Iterator[tuple[str, str]]:
    """(kind, field after it) for each `name:kind` of a path."""
    names = path.split(".")
    for name, after in zip(names, [*names[1:], ""], strict=True):
        if ":" in name:
            yield name.partition(":")[2], after.partition(":")[0]


def _check_settings(config: Config, dialect: Dialect, form: Form) -> None:
    """Each path is set once, and a part is set before the fields inside it."""
    settings = settings_of(config, dialect, form)
    for i, setting in enumerate(settings):
        for earlier in settings[:i]:
            inside = earlier.path == setting.path or earlier.path.startswith(f"{setting.path}.")
            if inside and earlier.field is not setting.field and earlier.reach == setting.reach != OF_A_KIND:
                names = f"config.{setting.field.names[0]} and config.{earlier.field.names[0]}"
                raise SpecError(earlier.path, f"is set by {names}, so the later replaces the earlier")
