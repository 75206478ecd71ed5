"""Which tensor of ours lies in which of theirs, and the way home, one by one and held to their shapes.

The rows of a family's table and of its form, for every layer, as far as the spec has their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.core.fold import declared
from dovetail.model import Model
from dovetail.port.convert import Convert
from dovetail.port.explicit import explicit
from dovetail.port.table import Dialect, Form, Row, numbered


class Move(NamedTuple):
    """Tensors of ours that lie in some of theirs, and how."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    convert: Convert


def imported(
    spec: Model, dialect: Dialect, form: Form, names: Collection[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, each of their `names` being read when its turn comes and no earlier; in the order of `names`."""
    shapes, ties = shapes_of(spec), ties_of(spec)
    written = {_of_now(name, dialect): name for name in names}
    found, place = list(moves(spec, dialect, form)), {name: i for i, name in enumerate(written)}
    moved = {one for move in found for one in move.theirs}
    for one in moved:
        if one not in place:
            raise FileError(f"{one}: is missing")
    again = [(theirs, ties[row.ours[0]]) for theirs, row in _rows(dialect, form) if row.ours[0] in ties and theirs in place]
    for extra in set(written) - moved - {theirs for theirs, _ in again}:
        if not any(fnmatchcase(extra, pattern) for pattern in dialect.stale):
            raise FileError(f"{extra}: has no place in this spec")
    owners: dict[str, Tensor] = {}
    for move in sorted(found, key=lambda move: min(place[one] for one in move.theirs)):
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
        fits(first, found[0], shape)
        yield path, found.pop(0)


def _rows(dialect: Dialect, form: Form) -> Iterator[tuple[str, Row]]:
    """(their name with what stands before it, row) of the family's own tensors and of the form's."""
    yield from ((form.prefix + row.theirs, row) for row in dialect.tensors)
    yield from ((row.theirs, row) for row in form.tensors)


def moves(spec: Model, dialect: Dialect, form: Form) -> Iterator[Move]:
    """The table's rows for every layer, as far as the spec has their tensors."""
    shapes, told = shapes_of(spec), explicit(spec)
    depths = {"layers": len(spec.layers), "encoder": 0 if spec.encoder is None else len(spec.encoder.layers)}
    for theirs, row in _rows(dialect, form):
        for layer in range(depths[row.ours[0].partition(".")[0]] if "{}" in row.ours[0] else 1):
            ours = tuple(path.replace("{}", str(layer)) for path in row.ours)
            if all(path in shapes for path in ours) and row.stands(told, layer):
                names = numbered(theirs.replace("{}", str(layer)), shapes[ours[0]][0])
                yield Move(ours, names, row.conversion(told, layer))


def shapes_of(spec: Model) -> dict[str, tuple[int, ...]]:
    """path -> shape of every tensor that a file holds."""
    return {d.path: d.weight.shape(d.scope) for d in declared(spec) if d.weight.stored}


def ties_of(spec: Model) -> dict[str, str]:
    """path of a tied tensor -> that of the one it is."""
    return {d.path: d.weight.same_as for d in declared(spec) if d.weight.same_as is not None}


def fits(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises FileError where a tensor has another shape."""
    if tuple(tensor.shape) != shape:
        raise FileError(f"{name}: has shape {tuple(tensor.shape)}, not {shape}")
