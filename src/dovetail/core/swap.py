"""swap: replace a part by another, and carry over the fields that both kinds have.

    fit("mla", old=Attention(heads=32, kv_heads=8), group=Mixer)   ->   Mla(heads=32), and kv_heads is lost

The new part is given as a kind's name, a mapping or a constructed part. A mapping names the fields that change; every other
field that both kinds declare with the same name and type keeps its value. A constructed part is used unchanged.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from dovetail.core.errors import SpecError
from dovetail.core.part import Part, default_of, field_types, from_data

P = TypeVar("P", bound=Part)


class Lost(NamedTuple):
    """A field of a replaced part that the new kind does not have: its path, its value, the new kind."""

    path: str
    value: Any
    kind: str

    def __str__(self) -> str:
        return f"{self.path} was {self.value!r}; {self.kind} has no such field"


def fit(new: Any, old: Any, group: type[P], path: str = "") -> P:
    """Return the part that `new` describes, with the fields of `old` that it does not name."""
    if isinstance(new, Part):
        if not isinstance(new, group):
            raise SpecError(path, f"{new.kind} is a {new.group}, not a {group.group}")
        return new
    part = from_data(new, group, path)
    if not isinstance(old, Part):
        return part
    data = group.sugar(new)
    given = set(data) if isinstance(data, Mapping) else set()
    new_types = field_types(type(part))
    shared = {
        name: getattr(old, name)
        for name, hint in field_types(type(old)).items()
        if name not in given and new_types.get(name) == hint
    }
    return dc.replace(part, **shared)


def losses(new: Part, old: Any, path: str) -> list[Lost]:
    """The fields of `old` that differ from their default and that the kind of `new` does not have."""
    if not isinstance(old, Part):
        return []
    known = field_types(type(new))
    changed = [field.name for field in dc.fields(old) if getattr(old, field.name) != default_of(field)]
    return [Lost(f"{path}.{name}", getattr(old, name), new.kind) for name in changed if name not in known]
