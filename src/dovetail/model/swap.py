"""swap: replace a part by another, and carry over the fields that both kinds have.

    fit("mla", old=Attention(heads=32, kv_heads=8), group=Mixer)   ->   Mla(heads=32), and kv_heads is lost

The new part is given as a kind's name, a mapping or a constructed part. A mapping names the fields that change; every other
field that both kinds declare with the same name and type keeps its value. A constructed part is used unchanged.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dovetail.base.errors import SpecError, names_or_nearest
from dovetail.base.value import options
from dovetail.nn.groups import GROUPS, Mixer, Position
from dovetail.spec.part import KINDS, FieldMatch, Part, default_of, field_types, from_data, join, walk_spec

if TYPE_CHECKING:
    from dovetail.model.model import Model

P = TypeVar("P", bound=Part)
M = TypeVar("M", bound="Model")


class LostField(NamedTuple):
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
    data = group.from_short_form(new)
    given = set(data) if isinstance(data, Mapping) else set()
    new_types = field_types(type(part))
    shared = {
        name: getattr(old, name)
        for name, hint in field_types(type(old)).items()
        if name not in given and new_types.get(name) == hint
    }
    return dc.replace(part, **shared)


def losses(new: Part, old: Any, path: str) -> list[LostField]:
    """The fields of `old` that differ from their default and that the kind of `new` does not have."""
    if not isinstance(old, Part):
        return []
    known = field_types(type(new))
    changed = [field.name for field in dc.fields(old) if getattr(old, field.name) != default_of(field)]
    return [LostField(f"{path}.{name}", getattr(old, name), new.kind) for name in changed if name not in known]


def replaced(new: Any, old: Any, group: type[P], path: str, lost: list[LostField]) -> P:
    """The part that `new` describes in place of `old`, and what is lost."""
    part = fit(new, old, group, path)
    lost += losses(part, old, path)
    return part


def with_position(mixer: Mixer, new: Any, path: str, lost: list[LostField]) -> Mixer:
    """The mixer with a new position wherever it has one."""
    fields = {f.name: getattr(mixer, f.name) for f in dc.fields(mixer) if isinstance(getattr(mixer, f.name), Position)}
    return dc.replace(mixer, **{name: replaced(new, old, Position, f"{path}.{name}", lost) for name, old in fields.items()})


def no_group(spec: Part, where: str, new: Any) -> tuple[str, str]:
    """Return the problem and the remedy of a swap of something that is not a group; a field is set instead."""
    paths = [join(path, where) for path, part in walk_spec(spec) if any(field.name == where for field in dc.fields(part))]
    if paths:
        pattern = ".".join("*" if name.isdigit() else name for name in paths[0].split("."))
        return "is a field, not a group of parts", f"set it: --set '{pattern}={new}'"
    return "is not a group of parts", f"{names_or_nearest(where, [g.group for g in GROUPS], 'groups')}; or give a path"


def swap_group(part: Any, new: Any, group: type[Part], lost: list[LostField], path: str = "") -> Any:
    """The new part in every field that holds one of this group; an empty field stays empty."""

    def below(value: Part, here: str) -> Part:
        return (
            replaced(new, value, group, here, lost) if isinstance(value, group) else swap_group(value, new, group, lost, here)
        )

    changes: dict[str, Any] = {}
    for name, value in ((f.name, getattr(part, f.name)) for f in dc.fields(part)):
        here = join(path, name)
        if isinstance(value, Part):
            changes[name] = below(value, here)
        elif isinstance(value, tuple) and value and isinstance(value[0], Part):
            changes[name] = tuple(below(item, join(here, str(i))) for i, item in enumerate(value))
    return dc.replace(part, **changes) if changes else part


def swap_part(spec: M, where: str, new: Any, lost: list[LostField]) -> M:
    """`spec` with another part at a path or in every place of a group, and what is lost (Model.swap)."""
    if where == Position.group:
        return swap_position(spec, new, lost)
    group = next((group for group in GROUPS if group.group == where), None)
    if group is not None and (not isinstance(new, Part) or isinstance(new, group)):
        return swap_group(spec, new, group, lost)
    if "." not in where and where not in {field.name for field in dc.fields(spec)}:
        raise SpecError(where, *no_group(spec, where, new))

    def at(place: FieldMatch) -> Any:
        groups = [option for option in options(place.hint) if isinstance(option, type) and issubclass(option, Part)]
        if new is None or not groups:
            return new
        return replaced(new, place.old, groups[0], place.path, lost)

    return spec.rewrite(where, at)


def swap_position(spec: M, new: Any, lost: list[LostField], path: str = "") -> M:
    """`spec` with another position at its own site, and none at the other."""
    cleared = KINDS["none"]()
    site = fit(new, None, Position).site
    inside = cleared if site == "stream" else new
    stream = replaced(new, spec.position, Position, "position", lost) if site == "stream" else cleared
    blocks = tuple(
        dc.replace(b, **{n: with_position(m, inside, f"{path}layers.{i}.{n}", lost) for n, m in b.self_mixers().items()})
        for i, b in enumerate(spec.layers)
    )
    encoder = None if spec.encoder is None else swap_position(spec.encoder, new, lost, f"{path}encoder.")
    swapped = dc.replace(spec, position=stream, layers=blocks, encoder=encoder)
    if not spec.mtp:
        return swapped
    return swapped.rewrite("mtp.*.*.mixer", lambda at: at.old and with_position(at.old, inside, f"{path}{at.path}", lost))
