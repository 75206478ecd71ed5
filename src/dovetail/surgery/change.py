"""Which fields differ between two specs, and which of them change how the tensors below are read.

A change is **seen in the shapes** if another value of the field changes nothing but shapes, ties, first values or biases of the
tensors a part declares (heads, hidden, tied, packed): their own rows tell of it. Any other change of a part (its kind, its mask
or position, a scale, a tensor that comes or goes) is a **reader** change: equal numbers are read another way than before.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator
from typing import Any, NamedTuple

from dovetail.core.part import Part, join, plain, walk
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

TRAINING_ONLY = frozenset({"dropout"})  # fields that leave what a tensor means alone
PACKED_AXIS = "slots"  # within a group of heads: its queries, then its key, then its value
PACKS = {"qkv": ("q", "k", "v")}  # a weight with that axis, and those it stands for


class Change(NamedTuple):
    """One field that differs: its path in the spec, both values as plain data, and whether it is a reader change."""

    path: str
    a: Any
    b: Any
    reader: bool


class Differs(NamedTuple):
    """A plain field that differs in two parts of one kind at one path."""

    path: str
    a: Part
    b: Part
    field: str

    @property
    def what(self) -> tuple[type[Part], str]:
        """The field, wherever it stands."""
        return type(self.b), self.field

    def judged(self, shapes_only: bool, shown: bool) -> Change:
        """The change. A field that shapes tensors is silent, but for two values that give one shape (62 rows and 2 more,
        for 64); and a default only written out (`hidden: 2048` for the usual 2048) is none."""
        old, new = getattr(self.a, self.field), getattr(self.b, self.field)
        silent = shapes_only and (shown or old is None or new is None)
        reader = not silent and self.field not in TRAINING_ONLY
        return Change(join(self.path, self.field), plain(old), plain(new), reader)


def changes(a: Part, b: Part) -> list[Change]:
    """Every field that differs, layers compared by their number."""
    envs = {place: scope for _, _, scope, place in places(b)}
    found = list(_differing("", a, b))
    plain_ones = [d for d in found if isinstance(d, Differs)]
    # a field is judged by all its places: only the second layer shows that a table is shared
    shaping = {d.what for d in plain_ones if _shapes_only(d, envs.get(d.path, Scope()))}
    shown = {
        d.what for d in plain_ones if _signature(d.a, envs.get(d.path, Scope())) != _signature(d.b, envs.get(d.path, Scope()))
    }
    return [d if isinstance(d, Change) else d.judged(d.what in shaping, d.what in shown) for d in found]


def _differing(path: str, a: Part, b: Part) -> Iterator[Change | Differs]:
    if type(a) is not type(b):
        yield Change(path, a.to_data(), b.to_data(), True)
        return
    for field in dc.fields(a):
        old, new, here = getattr(a, field.name), getattr(b, field.name), join(path, field.name)
        if old == new:
            continue
        if isinstance(old, Part) and isinstance(new, Part):
            yield from _differing(here, old, new)
        elif isinstance(old, Part) or isinstance(new, Part):
            yield Change(here, plain(old), plain(new), True)
        elif _holds_parts(old) or _holds_parts(new):
            yield from _differing_items(here, old, new)
        else:
            yield Differs(path, a, b, field.name)


def _differing_items(path: str, old: tuple[Part, ...], new: tuple[Part, ...]) -> Iterator[Change | Differs]:
    for i in range(max(len(old), len(new))):
        here = join(path, str(i))
        if i >= len(old) or i >= len(new):
            yield Change(here, plain(old[i]) if i < len(old) else None, plain(new[i]) if i < len(new) else None, True)
        elif old[i] != new[i]:
            yield from _differing(here, old[i], new[i])


def _holds_parts(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, Part) for item in value)


# -- seen in the shapes, or not -------------------------------------------------------------------------------------

Signature = dict[str, tuple[Any, ...]]  # tensor name -> shape by axis, tie, first value


def _shapes_only(d: Differs, scope: Scope) -> bool:
    """Whether values of the field (those at hand, a size twice as large, the part's samples) change shapes and no more."""
    values = [getattr(d.a, d.field), getattr(d.b, d.field)]
    values += [2 * value for value in values if type(value) is int] + type(d.b).samples().get(d.field, [])
    made = [_signature(dc.replace(d.b, **{d.field: value}), scope) for value in values]
    same_tensors = made[0][0] == made[1][0]
    return same_tensors and any(signature != made[0] for signature in made)


def _signature(part: Part, scope: Scope) -> tuple[frozenset[str], Signature]:
    """(names of the tensors but for biases, a packed one by its pieces; and how each is shaped) of a part and all below it."""
    names: set[str] = set()
    shapes: Signature = {}
    for path, below, inside in walk(part, scope, scope.path):
        for weight in below.weights(inside):
            if weight.role == "const":
                continue
            name = join(path, weight.name)
            shapes[name] = (sizes(weight, inside), weight.same_as, weight.init)
            if weight.role != "bias":
                names.update(join(path, piece) for piece in pieces(weight) or (weight.name,))
    return frozenset(names), shapes


def sizes(weight: Weight, scope: Scope) -> dict[str, int]:
    """Axis name -> size, major first; an axis that comes twice is numbered."""
    made: dict[str, int] = {}
    for axis in scope.names((*weight.batch, *weight.out, *weight.inp)):
        made[f"{axis} (in)" if axis in made else axis] = scope.sizes[axis]
    return made


def pieces(weight: Weight) -> tuple[str, ...]:
    """Names of the weights that a packed one stands for: q.weight, k.weight and v.weight for qkv.weight; none otherwise."""
    stem, dot, leaf = weight.name.partition(".")
    return tuple(f"{name}{dot}{leaf}" for name in PACKS.get(stem, ())) if PACKED_AXIS in weight.out else ()


# -- module tree and spec tree --------------------------------------------------------------------------------------


def places(spec: Part) -> Iterator[tuple[str, Part, Scope, str]]:
    """(path in the module tree, part, its scope, path in the spec tree). One written norm may be several modules."""
    written: dict[str, tuple[str, Part]] = {}
    for path, part, scope in walk(spec):
        above, name = _parent(path, written)
        place = "" if above is None else join(above[0], _field(above[1], name, part))
        written[path] = (place, part)
        yield path, part, scope, place


def _parent(path: str, written: dict[str, tuple[str, Part]]) -> tuple[tuple[str, Part] | None, str]:
    above = path
    while above:
        above = above.rpartition(".")[0]
        if above in written:
            return written[above], path.removeprefix(above).lstrip(".")
    return None, ""


def _field(above: Part, name: str, part: Part) -> str:
    """The field of `above` that holds this part: of its own name, or else the one with this very part."""
    held = above.parts()
    if held.get(name) is part:
        return name
    return next((field for field, item in held.items() if item is part), name)
