"""Carry tensors from one spec to another: apply every row of a diff.

    kept, reinterpreted   the tensor itself
    transformed           unpacked, KV heads repeated and averaged, offset, written over b's initial value, packed
    new, impossible       b's own initial value

Shapes: while it is transformed, a tensor has one dimension for each named axis: (kv_heads, head, embed). A packed one is
(kv_heads, slots, head, …): the queries of a group, then its key, then its value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.core.module import at_least_fp32
from dovetail.core.packed import piece
from dovetail.core.weight import PACKED_AXIS
from dovetail.weights.surgery.change import sizes
from dovetail.weights.surgery.status import Diff, Move, Row
from dovetail.weights.surgery.tensors import Tensor as Declared, tensors as declared_tensors


def apply(diff: Diff, tensors_of_a: Mapping[str, Tensor], init_b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of b, under the names of `init_b`: those of a carried over, the rest as in `init_b`.

    Both mappings are like a `state_dict`: path -> tensor; a tied one may appear under each of its names. The result has the
    dtype and device of `init_b`; a tensor that is kept is not copied where these agree.
    """
    of_b = declared_tensors(diff.b)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in diff.tensors:
        if row.b is not None and row.moves:
            rows[row.b].append(row)
    results: dict[str, Tensor] = {}
    for path, tensor in of_b.items():
        if tensor.weight.same_as is None:
            init = _get(init_b, path, tensor.shape, "the initial tensors of b")
            results[path] = _carried(tensor, rows[path], tensors_of_a, init)
    return {path: results[of_b[path].owner] if path in of_b else init_b[path] for path in init_b}


def _carried(tensor: Declared, rows: list[Row], tensors_of_a: Mapping[str, Tensor], init: Tensor) -> Tensor:
    """One tensor of b from the rows that lead to it."""
    if not rows:
        return init
    if all(row.status != "transformed" for row in rows):
        return _get(tensors_of_a, rows[0].a or "", tensor.shape, "the tensors of a").to(init)
    axes = sizes(tensor.weight, tensor.scope)
    out = init.reshape(tuple(axes.values())).clone()
    for row in rows:
        x = _get(tensors_of_a, row.a or "", row.shapes["a"], "the tensors of a").to(init)
        for move in row.moves:
            target = out if move.to_piece is None else piece(out, list(axes).index(PACKED_AXIS), move.to_piece)
            _write(target, _stepped(_source_piece(x, move), move))
    return out.reshape(tensor.shape)


def _get(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...], where: str) -> Tensor:
    if path not in tensors:
        raise FileError(f"{path}: missing from {where}")
    if tuple(tensors[path].shape) != tuple(shape):
        raise FileError(f"{path}: shape {tuple(tensors[path].shape)} in {where}; the spec declares {tuple(shape)}")
    return tensors[path].detach()


def _source_piece(x: Tensor, move: Move) -> Tensor:
    """The piece of a's tensor that is carried over, one dimension per axis."""
    whole = x.reshape(tuple(move.stored.values()))
    taken = whole if move.from_piece is None else piece(whole, list(move.stored).index(PACKED_AXIS), move.from_piece)
    return taken.reshape(tuple(move.axes.values()))


def _stepped(x: Tensor, move: Move) -> Tensor:
    """The piece after its steps."""
    for step in move.steps:
        if step.axis:
            dim = list(move.axes).index(step.axis)
            x = x.repeat_interleave(step.repeat, dim) if step.repeat > 1 else x
            x = _mean(x, dim, step.mean) if step.mean > 1 else x
        x = x + step.add if step.add else x
    return x


def _mean(x: Tensor, dim: int, every: int) -> Tensor:
    """(…, m · every, …) -> (…, m, …), summed in at least float32."""
    return x.unflatten(dim, (-1, every)).to(at_least_fp32(x.dtype)).mean(dim + 1).to(x.dtype)


def _write(target: Tensor, x: Tensor) -> None:
    """Write x over the target: all of a piece, or as many rows as both have."""
    if target.numel() == x.numel():
        target.copy_(x.reshape(target.shape))
        return
    both = tuple(slice(0, min(pair)) for pair in zip(target.shape, x.shape, strict=True))
    target[both] = x[both]
