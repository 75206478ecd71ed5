"""Carry tensors from one spec to another: every row of a diff really done.

    kept                  the tensor itself
    transformed           unpacked, heads repeated and averaged, shifted, written over b's first value, packed
    new, impossible       b's own first value

Shapes: while it is worked on, a tensor has one dimension for each named axis: (kv_heads, head, embed). A packed one is
(kv_heads, slots, head, …): the queries of a group, then its key, then its value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.core.module import at_least_fp32
from dovetail.surgery.change import PACKED_AXIS, sizes
from dovetail.surgery.fate import Diff, Move, Row
from dovetail.surgery.fate import Tensor as Declared
from dovetail.surgery.fate import tensors as declared_tensors


def apply(diff: Diff, tensors_of_a: Mapping[str, Tensor], init_b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of b, under the names `init_b` has: those of a carried over, the rest as `init_b` gives them.

    Both mappings are like a `state_dict`: path -> tensor; a tied one may be there under each of its names. The result has
    the dtype and device of `init_b`; what is kept without a change is the very tensor where these agree.
    """
    here = declared_tensors(diff.b)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in diff.tensors:
        if row.b is not None and row.moves:
            rows[row.b].append(row)
    made: dict[str, Tensor] = {}
    for path, tensor in here.items():
        if tensor.weight.same_as is None:
            init = _given(init_b, path, tensor.shape, "the first tensors of b")
            made[path] = _carried(tensor, rows[path], tensors_of_a, init)
    return {path: made[here[path].owner] if path in here else init_b[path] for path in init_b}


def _carried(tensor: Declared, rows: list[Row], given: Mapping[str, Tensor], init: Tensor) -> Tensor:
    """One tensor of b from the rows that lead to it."""
    if not rows:
        return init
    if all(row.fate != "transformed" for row in rows):
        return _given(given, rows[0].a or "", tensor.shape, "the tensors of a").to(init)
    axes = sizes(tensor.weight, tensor.scope)
    out = init.reshape(tuple(axes.values())).clone()
    for row in rows:
        x = _given(given, row.a or "", row.shapes["a"], "the tensors of a").to(init)
        for move in row.moves:
            place = out if move.to_piece is None else _piece(out, list(axes), move.to_piece)
            _put(place, _moved(_taken(x, move), move))
    return out.reshape(tensor.shape)


def _given(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...], where: str) -> Tensor:
    if path not in tensors:
        raise FileError(f"{where} hold no {path!r}")
    if tuple(tensors[path].shape) != tuple(shape):
        raise FileError(f"{path}: is of shape {tuple(tensors[path].shape)} in {where}, but the spec says {tuple(shape)}")
    return tensors[path].detach()


def _taken(x: Tensor, move: Move) -> Tensor:
    """The piece of a's tensor that moves, one dimension an axis."""
    whole = x.reshape(tuple(move.stored.values()))
    piece = whole if move.from_piece is None else _piece(whole, list(move.stored), move.from_piece)
    return piece.reshape(tuple(move.axes.values()))


def _piece(packed: Tensor, axes: list[str], which: int) -> Tensor:
    """A view of the queries (0), the keys (1) or the values (2) of a packed tensor (kv_heads, slots, head, …)."""
    dim = axes.index(PACKED_AXIS)
    queries = packed.shape[dim] - 2
    return packed.narrow(dim, 0, queries) if which == 0 else packed.narrow(dim, queries + which - 1, 1)


def _moved(x: Tensor, move: Move) -> Tensor:
    """The piece after its steps."""
    for step in move.steps:
        if step.axis:
            dim = list(move.axes).index(step.axis)
            x = x.repeat_interleave(step.repeat, dim) if step.repeat > 1 else x
            x = _mean(x, dim, step.mean) if step.mean > 1 else x
        x = x + step.add if step.add else x
    return x


def _mean(x: Tensor, dim: int, every: int) -> Tensor:
    """(…, m · every, …) -> (…, m, …), added up in float32 at least."""
    return x.unflatten(dim, (-1, every)).to(at_least_fp32(x.dtype)).mean(dim + 1).to(x.dtype)


def _put(place: Tensor, x: Tensor) -> None:
    """Write x where it belongs: into a piece whole, else over as many rows as both have."""
    if place.numel() == x.numel():
        place.copy_(x.reshape(place.shape))
        return
    both = tuple(slice(0, min(pair)) for pair in zip(place.shape, x.shape, strict=True))
    place[both] = x[both]
