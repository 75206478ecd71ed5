"""Which fields differ between two specs, and which of these changes reinterpret the tensors of their part.

A change **shows in the shapes** if another value of the field changes nothing but shapes, ties, initial values or biases of the
tensors that a part declares (heads, hidden, tied, packed): the rows of those tensors report it. Any other change of a part (its
kind, its mask or position, a scale, a tensor that is added or removed) **reinterprets**: the same numbers are used in another
way. Fields that a part declares in `proof.training_only` do neither.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from typing import Any, NamedTuple

from dovetail.account import and_above
from dovetail.spec.part import Part, join, plain, walk, weights_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


class ChangedField(NamedTuple):
    """One field that differs: its path in the spec, both values as plain data, and whether it reinterprets tensors."""

    path: str
    a: Any
    b: Any
    reinterprets: bool


class FieldChange(NamedTuple):
    """A plain field that differs between two parts of one kind at one path."""

    path: str
    a: Part
    b: Part
    field: str

    @property
    def key(self) -> tuple[type[Part], str]:
        """The name of the field, without its path."""
        return type(self.b), self.field

    def change(self, shapes_only: bool, shape_differs: bool) -> ChangedField:
        """Return the change. A field that shapes tensors does not reinterpret them, except where both values give the same
        shape (62 rows and 2 more, for 64); a default written out (`hidden: 2048` for a default of 2048) does not either."""
        old, new = getattr(self.a, self.field), getattr(self.b, self.field)
        in_rows = shapes_only and (shape_differs or old is None or new is None)
        reinterprets = not in_rows and self.field not in self.b.proof.training_only
        return ChangedField(join(self.path, self.field), plain(old), plain(new), reinterprets)


def changes(a: Part, b: Part) -> list[ChangedField]:
    """Return every field that differs; layers are compared by their number."""
    scopes = {place: scope for _, _, scope, place in places(b)}
    differing = list(_differing("", a, b))
    fields = [d for d in differing if isinstance(d, FieldChange)]
    # a field is judged by all its places: only the second layer shows that a table is shared
    shapes_only = {d.key for d in fields if _shapes_only(d, scopes.get(d.path, Scope()))}
    shape_differs = {
        d.key for d in fields if _signature(d.a, scopes.get(d.path, Scope())) != _signature(d.b, scopes.get(d.path, Scope()))
    }
    return [d if isinstance(d, ChangedField) else d.change(d.key in shapes_only, d.key in shape_differs) for d in differing]


def _differing(path: str, a: Part, b: Part) -> Iterator[ChangedField | FieldChange]:
    if type(a) is not type(b):
        yield ChangedField(path, a.to_data(), b.to_data(), True)
        return
    for field in dc.fields(a):
        old, new, here = getattr(a, field.name), getattr(b, field.name), join(path, field.name)
        if old == new:
            continue
        if isinstance(old, Part) and isinstance(new, Part):
            yield from _differing(here, old, new)
        elif isinstance(old, Part) or isinstance(new, Part):
            yield ChangedField(here, plain(old), plain(new), True)
        elif _holds_parts(old) or _holds_parts(new):
            yield from _differing_items(here, old, new)
        else:
            yield FieldChange(path, a, b, field.name)


def _differing_items(path: str, old: tuple[Part, ...], new: tuple[Part, ...]) -> Iterator[ChangedField | FieldChange]:
    for i in range(max(len(old), len(new))):
        here = join(path, str(i))
        if i >= len(old) or i >= len(new):
            yield ChangedField(here, plain(old[i]) if i < len(old) else None, plain(new[i]) if i < len(new) else None, True)
        elif old[i] != new[i]:
            yield from _differing(here, old[i], new[i])


def _holds_parts(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, Part) for item in value)


# -- whether a change shows in the shapes ---------------------------------------------------------------------------

Signature = dict[str, tuple[Any, ...]]  # tensor name -> shape by axis, tie, initial value


def _shapes_only(d: FieldChange, scope: Scope) -> bool:
    """Whether values of the field (both given ones, a size twice as large, the part's samples) change shapes and nothing
    else."""
    values = [getattr(d.a, d.field), getattr(d.b, d.field)]
    values += [2 * value for value in values if type(value) is int] + d.b.proof.samples.get(d.field, [])
    signatures = [_signature(dc.replace(d.b, **{d.field: value}), scope) for value in values]
    same_tensors = signatures[0][0] == signatures[1][0]
    return same_tensors and any(signature != signatures[0] for signature in signatures)


def _signature(part: Part, scope: Scope) -> tuple[frozenset[str], Signature]:
    """(names of the tensors except biases, a packed one as its pieces; how each is shaped) of a part and all parts below it."""
    names: set[str] = set()
    shapes: Signature = {}
    for path, below, inside in walk(part, scope, scope.path):
        for weight in weights_of(below, inside):
            if weight.role == "const":
                continue
            name = join(path, weight.name)
            shapes[name] = (sizes(weight, inside), weight.same_as, weight.init)
            if weight.role != "bias":
                names.update(join(path, piece) for piece in weight.packs or (weight.name,))
    return frozenset(names), shapes


def sizes(weight: Weight, scope: Scope) -> dict[str, int]:
    """Axis name -> size, major first; an axis that comes twice is marked as the input's."""
    by_axis: dict[str, int] = {}
    for axis in scope.names((*weight.batch, *weight.out, *weight.inp)):
        by_axis[f"{axis} (in)" if axis in by_axis else axis] = scope.sizes[axis]
    return by_axis


# -- module tree and spec tree --------------------------------------------------------------------------------------


def places(spec: Part) -> Iterator[tuple[str, Part, Scope, str]]:
    """(path in the module tree, part, its scope, path in the spec tree). One norm of a spec may be several modules."""
    visited: dict[str, tuple[str, Part]] = {}
    for path, part, scope in walk(spec):
        parent, name = _parent(path, visited)
        place = "" if parent is None else join(parent[0], _field(parent[1], name, part))
        visited[path] = (place, part)
        yield path, part, scope, place


def _parent(path: str, visited: dict[str, tuple[str, Part]]) -> tuple[tuple[str, Part] | None, str]:
    above = next((above for above in and_above(path) if above in visited), None)
    return (None, "") if above is None else (visited[above], path.removeprefix(above).lstrip("."))


def _field(parent: Part, name: str, part: Part) -> str:
    """The field of `parent` that holds this part: the one of its own name, else the one with this same part."""
    children = parent.parts()
    if children.get(name) is part:
        return name
    return next((field for field, item in children.items() if item is part), name)
