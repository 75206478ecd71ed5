"""Which tensors of a checkpoint hold which tensors of ours: the rows of a dialect and of its form, for every layer.

moves(spec, dialect, form)                     every tensor of the spec, each exactly once
ImportPlan(spec, dialect, form, names)         the same for the names in a checkpoint: missing and unknown ones are errors
plan.read(read), plan.dropped(sizes)           our tensors one by one; the tensors that are not imported
"""

from __future__ import annotations

import dataclasses as dc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.base.limits import CONFIG_LAYERS, MAX_TENSORS
from dovetail.hf.convert import IDENTITY, Conversion
from dovetail.hf.resolved import explicit
from dovetail.hf.table import Dialect, Form, Row, numbered
from dovetail.model.model import Model
from dovetail.spec.fold import declared


class Move(NamedTuple):
    """Tensors of ours, the tensors of a checkpoint that hold them, and the conversion."""

    paths: tuple[str, ...]
    hf_names: tuple[str, ...]
    convert: Conversion
    fused: str | None = None  # the parameter of a module of transformers that holds all experts (Row.fused)


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
        self.stored = {_present_name(name, dialect): name for name in names}  # present name -> name in the file
        self.used = {one for move in self.moves for one in move.hf_names}
        for one in self.used:
            if one not in self.stored:
                raise FileError(f"{one}: is missing")
        tied = [(hf_name, ties[row.paths[0]]) for hf_name, row in _rows(dialect, form) if row.paths[0] in ties]
        copies = [*tied, *((pattern, path) for pattern, path in dialect.copies.items() if path in self.shapes)]
        copies += [(move.hf_names[0], move.paths[0]) for move in copies_ahead(spec, dialect)]
        rest = [name for name in self.stored if name not in self.used]
        self.copies = {name: path for name in rest for pattern, path in copies if fnmatchcase(name, pattern)}
        self.skips = (*dialect.skips, *form.skips)
        for name in rest:
            if name not in self.copies and not any(fnmatchcase(name, skip.pattern) for skip in self.skips):
                raise FileError(f"{name}: has no place in this spec")

    def read(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(our path, tensor) in the order of the files; each tensor is read when its turn comes."""
        place = {name: i for i, name in enumerate(self.stored)}
        owners: dict[str, Tensor] = {}
        for move in sorted(self.moves, key=lambda move: min(place[hf_name] for hf_name in move.hf_names)):
            shapes = [self.shapes[path] for path in move.paths]
            for path, tensor in _converted(move, [read(self.stored[hf_name]) for hf_name in move.hf_names], shapes):
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
        result = []
        for skip in self.skips:
            names = [name for name in rest if fnmatchcase(name, skip.pattern)]
            rest = [name for name in rest if name not in set(names)]
            if names:
                result.append(Dropped(skip.pattern, skip.reason, len(names), sum(sizes[name] for name in names)))
        return result


def warn_dropped(dropped: Sequence[Dropped]) -> None:
    """Warn once for each pattern of tensors that are not imported."""
    for pattern in dropped:
        warnings.warn(str(pattern), DroppedTensors, stacklevel=3)


def _present_name(name: str, dialect: Dialect) -> str:
    """The present name of a tensor with an older one."""
    return next((name.removesuffix(old) + new for old, new in dialect.legacy_suffixes.items() if name.endswith(old)), name)


def _converted(move: Move, hf_tensors: list[Tensor], shapes: list[tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of one move, each checked against its shape."""
    first, given = move.hf_names[0], tuple(hf_tensors[0].shape)
    try:
        tensors = move.convert.from_hf(hf_tensors, shapes)
    except (RuntimeError, IndexError, ValueError) as error:  # a shape of too few dimensions, for example
        raise FileError(f"{first}: has shape {given}, which does not hold {shapes}") from error
    hf_tensors.clear()  # free the memory of what was read
    if len(tensors) != len(shapes):
        raise FileError(f"{first}: has shape {given}, which does not hold {shapes}")
    for path, shape in zip(move.paths, shapes, strict=True):
        check_shape(first, tensors[0], shape)
        yield path, tensors.pop(0)


def _rows(dialect: Dialect, form: Form) -> Iterator[tuple[str, Row]]:
    """(name in the checkpoint, row) of the family's tensors, with the form's prefix, and of the form's own."""
    yield from ((form.prefix + row.hf_name, row) for row in dialect.tensors)
    yield from ((row.hf_name, row) for row in form.tensors)


def moves(spec: Model, dialect: Dialect, form: Form) -> list[Move]:
    """The rows of a dialect for every layer, as far as the spec has their tensors. Raises SpecError where a tensor of the spec
    lies in no tensor of the checkpoint or in two, or where the checkpoint would have more than MAX_TENSORS tensors."""
    shapes, sizes = shapes_of(spec), explicit(spec)
    encoder = 0 if spec.encoder is None else len(spec.encoder.layers)
    depths = {"layers": len(spec.layers), "encoder": encoder, "mtp": len(spec.mtp)}
    result: list[Move] = []
    holders: dict[str, str] = {}  # our path -> the tensor of the checkpoint
    count = 0
    for hf_name, row in _rows(dialect, form):
        for layer in range(depths[row.paths[0].partition(".")[0]] if "{}" in row.paths[0] else 1):
            paths = tuple(path.replace("{}", str(layer)) for path in every_layer(row.paths, len(spec.layers)))
            if not all(path in shapes for path in paths) or not row.applies(sizes, layer):
                continue
            name = placed(hf_name, len(spec.layers), layer)
            copies = shapes[paths[0]][0] if row.numbered else 1
            count += copies
            if count > MAX_TENSORS:
                raise SpecError(paths[0], f"{copies:,} tensors in {dialect.name}", f"a checkpoint may have {MAX_TENSORS:,}")
            for path in paths:
                if path in holders:
                    raise SpecError(path, f"lies in two tensors of {dialect.name}", f"{holders[path]} and {name}")
                holders[path] = name
            prefix = hf_name.removesuffix(row.hf_name)
            fused = None if row.fused is None else placed(prefix + row.fused, len(spec.layers), layer)
            result.append(Move(paths, numbered(name, copies), row.conversion(sizes, layer), fused))
    for path in shapes:
        if path not in holders:
            raise SpecError(path, f"lies in no tensor of {dialect.name}", f"{form.architecture} has no place for it")
    return result


def every_layer(paths: Sequence[str], layers: int) -> list[str]:
    """The paths, those with `{all}` once per layer."""
    return [path.replace("{all}", str(i)) for path in paths for i in range(layers if "{all}" in path else 1)]


def placed(name: str, layers: int, i: int) -> str:
    """The name of a tensor in layer or depth i, of a model with this many layers."""
    return name.replace("{after}", str(layers + i)).replace("{}", str(i))


def copies_ahead(spec: Model, dialect: Dialect) -> list[Move]:
    """The second copies of tensors that each depth of multi-token prediction has in a checkpoint: they are written, too."""
    if dialect.ahead is None:
        return []
    ties, layers = ties_of(spec), len(spec.layers)
    return [
        Move((ties.get(path, path),), (placed(name, layers, i),), IDENTITY)
        for i in range(len(spec.mtp))
        for name, path in dialect.ahead.copies.items()
    ]


def count_ahead(config: Mapping[str, Any], dialect: Dialect, names: Collection[str]) -> dict[str, Any]:
    """The config with the number of depths of multi-token prediction that a checkpoint with these tensors has: transformers
    writes a number, but no tensors, and some published configs have tensors, but no number."""
    ahead, layers = dialect.ahead, config.get(dialect.layers)
    if ahead is None or not isinstance(layers, int):
        return dict(config)
    most = CONFIG_LAYERS if ahead.most is None else ahead.most
    found = next((i for i in range(most) if placed(ahead.marker, layers, i) not in names), most)
    return {**config, ahead.count: found} if found or ahead.count in config else dict(config)


def shapes_of(spec: Model) -> dict[str, tuple[int, ...]]:
    """path -> shape of every stored tensor."""
    return {d.path: d.weight.shape(d.scope) for d in declared(spec) if d.weight.stored}


def ties_of(spec: Model) -> dict[str, str]:
    """path of a tied tensor -> path of the tensor it shares."""
    return {d.path: d.weight.same_as for d in declared(spec) if d.weight.same_as is not None}


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise FileError where a tensor has another shape."""
    if tuple(tensor.shape) != shape:
        raise FileError(f"{name}: has shape {tuple(tensor.shape)}, not {shape}")
