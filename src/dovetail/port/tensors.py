"""Which tensor of ours lies in which of theirs, and the way home, one by one and held to their shapes.

The rows of a family's table and of its form, for every layer, as far as the spec has their tensors.
"""

from __future__ import annotations

import dataclasses as dc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

from dovetail.core.errors import FileError, SpecError
from dovetail.core.fold import declared
from dovetail.model import Model
from dovetail.port.convert import Convert
from dovetail.port.explicit import explicit
from dovetail.port.table import Dialect, Form, Row, Skip, numbered

MAX_NAMES = 2**20  # tensors of one checkpoint; DeepSeek-V3 has 91,991


class Move(NamedTuple):
    """Tensors of ours that lie in some of theirs, and how."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    convert: Convert


@dc.dataclass(frozen=True)
class Dropped:
    """Tensors of a checkpoint that are not imported: the pattern of their names, why, how many, and their bytes."""

    pattern: str
    reason: str
    tensors: int
    bytes: int

    def __str__(self) -> str:
        tensors = "1 tensor" if self.tensors == 1 else f"{self.tensors:,} tensors"
        return f"{self.pattern}: {tensors}, {self.bytes:,} bytes, not imported ({self.reason})"


class DroppedTensors(UserWarning):
    """Some tensors of a checkpoint are not imported, so an export does not write them."""


class ImportPlan:
    """Which tensors of a checkpoint become which of ours. Raises FileError where one is missing or unknown."""

    def __init__(self, spec: Model, dialect: Dialect, form: Form, names: Collection[str]) -> None:
        self.shapes, ties = shapes_of(spec), ties_of(spec)
        self.moves = list(moves(spec, dialect, form))
        self.stored = {_of_now(name, dialect): name for name in names}  # present name -> name in the file
        self.used = {one for move in self.moves for one in move.theirs}
        for one in self.used:
            if one not in self.stored:
                raise FileError(f"{one}: is missing")
        rows = [(theirs, ties[row.ours[0]]) for theirs, row in _rows(dialect, form) if row.ours[0] in ties]
        copies = [*rows, *((pattern, path) for pattern, path in dialect.copies.items() if path in self.shapes)]
        rest = [name for name in self.stored if name not in self.used]
        self.copies = {name: path for name in rest for pattern, path in copies if fnmatchcase(name, pattern)}
        self.skips = [skip for skip in _skips(spec, dialect) if skip.marker is None or skip.marker in self.stored]
        for name in rest:
            if name not in self.copies and not any(fnmatchcase(name, skip.pattern) for skip in self.skips):
                raise FileError(f"{name}: has no place in this spec")

    def read(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(our path, tensor) in the order of the files; each tensor of theirs is read when its turn comes, no earlier."""
        place = {name: i for i, name in enumerate(self.stored)}
        owners: dict[str, Tensor] = {}
        for move in sorted(self.moves, key=lambda move: min(place[one] for one in move.theirs)):
            shapes = [self.shapes[path] for path in move.ours]
            for path, tensor in _home(move, [read(self.stored[one]) for one in move.theirs], shapes):
                if path in self.copies.values():
                    owners[path] = tensor
                yield path, tensor
        for name, path in self.copies.items():  # a second copy of a tensor is allowed if it is equal
            copy = read(self.stored[name])
            if copy.shape != owners[path].shape or not copy.equal(owners[path]):
                raise FileError(f"{name}: is tied to {path}, yet holds other numbers")

    def dropped(self, sizes: Mapping[str, int]) -> list[Dropped]:
        """The tensors that are not imported, by the names and bytes of the files."""
        rest = [name for name in sizes if name not in self.used and name not in self.copies]
        found = []
        for skip in self.skips:
            names = [name for name in rest if fnmatchcase(name, skip.pattern)]
            rest = [name for name in rest if name not in set(names)]
            if names:
                found.append(Dropped(skip.pattern, skip.reason, len(names), sum(sizes[name] for name in names)))
        return found


def _skips(spec: Model, dialect: Dialect) -> list[Skip]:
    """The dialect's skips for a spec of this depth."""
    depth = str(len(spec.layers))
    return [
        Skip(skip.pattern.replace("{layers}", depth), skip.reason, skip.marker and skip.marker.replace("{layers}", depth))
        for skip in dialect.skips
    ]


def warn_dropped(dropped: Sequence[Dropped], stacklevel: int = 3) -> None:
    """Warn once for each pattern of tensors that are not imported."""
    for one in dropped:
        warnings.warn(str(one), DroppedTensors, stacklevel=stacklevel)


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


def moves(spec: Model, dialect: Dialect, form: Form) -> list[Move]:
    """The table's rows for every layer, as far as the spec has their tensors. Raises SpecError where a tensor of the spec lies
    in none of theirs or in two, or where the checkpoint would have more than MAX_NAMES tensors."""
    shapes, sizes = shapes_of(spec), explicit(spec)
    depths = {"layers": len(spec.layers), "encoder": 0 if spec.encoder is None else len(spec.encoder.layers)}
    found: list[Move] = []
    holders: dict[str, str] = {}  # our path -> their tensor
    count = 0
    for theirs, row in _rows(dialect, form):
        for layer in range(depths[row.ours[0].partition(".")[0]] if "{}" in row.ours[0] else 1):
            ours = tuple(path.replace("{}", str(layer)) for path in row.ours)
            if not all(path in shapes for path in ours) or not row.stands(sizes, layer):
                continue
            name = theirs.replace("{}", str(layer))
            copies = shapes[ours[0]][0] if row.numbered else 1
            count += copies
            if count > MAX_NAMES:
                raise SpecError(ours[0], f"{copies:,} tensors in {dialect.name}", f"a checkpoint may have {MAX_NAMES:,}")
            for path in ours:
                if path in holders:
                    raise SpecError(path, f"lies in two tensors of {dialect.name}", f"{holders[path]} and {name}")
                holders[path] = name
            found.append(Move(ours, numbered(name, copies), row.conversion(sizes, layer)))
    for path in shapes:
        if path not in holders:
            raise SpecError(path, f"lies in no tensor of {dialect.name}", f"{form.architecture} has no place for it")
    return found


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
