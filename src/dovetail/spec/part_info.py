"""What a part says of itself: kind, group, the first line of its docstring, and its fields with type and default."""

from __future__ import annotations

import dataclasses as dc
import types
import typing
from collections.abc import Iterator
from typing import Any

from dovetail.spec.part import Part, default_of, field_types, plain


@dc.dataclass(frozen=True)
class FieldInfo:
    """One field of a part: its name, its type in the words of a spec, and its default as plain data."""

    name: str
    type: str
    default: Any


@dc.dataclass(frozen=True)
class PartInfo:
    """One registered part."""

    kind: str
    group: str
    summary: str
    fields: tuple[FieldInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**dc.asdict(self), "fields": [dc.asdict(field) for field in self.fields]}


def summary_of(part: type[Part]) -> str:
    """Return the first line of a part's docstring."""
    return (part.__doc__ or "").partition("\n")[0]


def part_info(part: type[Part]) -> PartInfo:
    """Return what a part says of itself."""
    return PartInfo(part.kind, part.group, summary_of(part), tuple(_fields(part)))


def _fields(part: type[Part]) -> Iterator[FieldInfo]:
    hints = field_types(part)
    for field in dc.fields(part):
        yield FieldInfo(field.name, _type_text(hints[field.name]), plain(default_of(field)))


def _type_text(hint: Any) -> str:
    """Return a declared type in the words of a spec: int | null, half|adjacent, mask."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_text, args))
    if origin is typing.Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"list of {_type_text(args[0])}"
    if hint is type(None):
        return "null"
    return hint.group if issubclass(hint, Part) else hint.__name__
