"""Record which fields of a spec its writers read, so that no field is left out of an emitted file in silence.

    spec = observed(Model(...))        behaves as the spec itself; each read of a field is recorded
    ... writers run ...
    unread(spec)                       [("layers.0.mixer.temperature", "attention")]: fields that no writer has read

A read inside a method of the part counts too (`part.groups()` reads `kv_heads`), and so does one in `axes`, since writers take
sizes from the scope. Walks over all fields (`parts`, `repr`, `==`, `hash`) do not count.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import math
from collections.abc import Iterator
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.spec.part import Part, join


class Observation:
    """What is known of one observed part: the part itself, its path in the spec, and the fields read so far."""

    def __init__(self, part: Part, path: str) -> None:
        self.part = part
        self.path = path
        self.read: set[str] = set()
        self.ignored: set[str] = set()  # fields that the writer declares to have no place in an emitted file
        self.values = {field.name: _value(getattr(part, field.name), join(path, field.name)) for field in dc.fields(part)}

    def field(self, name: str) -> Any:
        """Return a field's value and record the read."""
        self.read.add(name)
        value = self.values[name]
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise SpecError(join(self.path, name), f"{number} cannot be written in a file", "use a finite number")
        return value


class _Observed:
    """Mixed into the class of a part: reads of fields go through its record."""

    _record: Observation

    def __getattribute__(self, name: str) -> Any:
        record: Observation = object.__getattribute__(self, "_record")
        if name == "__class__":  # equality and `dataclasses.replace` compare and make parts of the plain class
            return type(record.part)
        return record.field(name) if name in record.values else super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        return self._record.part == plain_part(other)

    def __hash__(self) -> int:
        return hash(self._record.part)

    def __repr__(self) -> str:
        return repr(self._record.part)

    def parts(self) -> dict[str, Part]:
        """The parts in the fields, as `Part.parts` returns them, observed."""
        record = self._record
        return {name: _at(record.values, name) for name in record.part.parts()}


def observed(part: Part, path: str = "") -> Any:
    """Return a part that behaves as the given one and records which of its fields are read."""
    observed: Any = object.__new__(_observed_class(type(part)))
    object.__setattr__(observed, "_record", Observation(part, path))
    return observed


def plain_part(part: Any) -> Any:
    """Return the part behind an observed one; anything else as it is."""
    return part._record.part if isinstance(part, _Observed) else part


def ignore(part: Any, fields: tuple[str, ...]) -> None:
    """Record that an emitted file has no place for these fields of the part. Parts without a spec are not observed."""
    if isinstance(part, _Observed):
        part._record.ignored.update(fields)


def unread(part: Any) -> list[tuple[str, str]]:
    """Return (path, kind) of each field neither read nor ignored, in this part and in the parts that its fields hold."""
    record: Observation = part._record
    missing = [(join(record.path, name), part.kind) for name in record.values if name not in record.read | record.ignored]
    for name in record.read - record.ignored:
        for child in _children(record.values[name]):
            missing += unread(child)
    return missing


def _children(value: Any) -> Iterator[Any]:
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, _Observed):
            yield item


def _value(value: Any, path: str) -> Any:
    if isinstance(value, Part):
        return observed(value, path)
    if isinstance(value, tuple):
        return tuple(_value(item, join(path, str(i))) for i, item in enumerate(value))
    return value


def _at(values: dict[str, Any], name: str) -> Any:
    field, _, index = name.partition(".")
    return values[field][int(index)] if index else values[field]


@functools.cache
def _observed_class(cls: type[Part]) -> type[Part]:
    return type(cls.__name__, (_Observed, cls), {})
