"""Carry tensors from one spec to another: apply every row of a diff; and change the spec of a model by it.

    kept, reinterpreted   the tensor itself
    transformed           unpacked, KV heads repeated and averaged, offset, written over b's initial value, packed
    new, impossible       b's own initial value

    result = graft(model, changed(model.part, ["layers.*.mixer.kv_heads=1"]))
    result.model, result.diff                    the new model, and the status of each tensor

A weight that `graft` keeps is not copied: both models share it, so train only one of them. A weight that is kept or moved is
never initialized first, so a large model needs no more memory and time than the weights that change.

Shapes: while it is transformed, a tensor has one dimension for each named axis: (kv_heads, head, embed). A packed one is
(kv_heads, slots, head, …): the queries of a group, then its key, then its value.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.model.construction import initial, on_meta, set_constants, tie
from dovetail.model.model import Model, ModelModule
from dovetail.nn.module import at_least_fp32, tensor_at
from dovetail.spec.fold import Declared, declared
from dovetail.spec.weight import PACKED_AXIS, piece
from dovetail.weights.surgery.change import sizes
from dovetail.weights.surgery.status import Diff, DiffRow, PieceMove, diff
from dovetail.weights.surgery.tensors import Tensor as PlacedTensor, tensors as placed_tensors


def apply(diff: Diff, tensors_of_a: Mapping[str, Tensor], init_b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of b, under the names of `init_b`: those of a carried over, the rest as in `init_b`.

    Both mappings are like a `state_dict`: path -> tensor; a tied one may appear under each of its names. The result has the
    dtype and device of `init_b`; a tensor that is kept is not copied where these agree.
    """
    of_b = placed_tensors(diff.b)
    rows: dict[str, list[DiffRow]] = defaultdict(list)
    for row in diff.tensors:
        if row.b is not None and row.moves:
            rows[row.b].append(row)
    results: dict[str, Tensor] = {}
    for path, tensor in of_b.items():
        if tensor.weight.same_as is None:
            init = _get(init_b, path, tensor.shape, "the initial tensors of b")
            results[path] = _carried(tensor, rows[path], tensors_of_a, init)
    return {path: results[of_b[path].owner] if path in of_b else init_b[path] for path in init_b}


def _carried(tensor: PlacedTensor, rows: list[DiffRow], tensors_of_a: Mapping[str, Tensor], init: Tensor) -> Tensor:
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


def _source_piece(x: Tensor, move: PieceMove) -> Tensor:
    """The piece of a's tensor that is carried over, one dimension per axis."""
    whole = x.reshape(tuple(move.stored.values()))
    taken = whole if move.from_piece is None else piece(whole, list(move.stored).index(PACKED_AXIS), move.from_piece)
    return taken.reshape(tuple(move.axes.values()))


def _stepped(x: Tensor, move: PieceMove) -> Tensor:
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


# -- the model --------------------------------------------------------------------------------------------------------


class Grafted(NamedTuple):
    """A model of the new spec, and the status of each tensor."""

    model: ModelModule
    diff: Diff


def graft(
    model: ModelModule, spec: Model, *, picks: Sequence[int] | None = None, redraw: bool = False, seed: int = 0
) -> Grafted:
    """Return a model of `spec` with the weights of `model`.

    Layers are matched by their number, or layer picks[j] becomes layer j. A tensor for which no map is known raises SpecError
    with its path, or is initialized where `redraw` is true; new tensors are sampled from (seed, path).
    """
    result = diff(model.part, spec, picks)
    impossible = [row for row in result.tensors if row.status == "impossible"]
    if impossible and not redraw:
        more = f" (and {len(impossible) - 1} more tensors)" if len(impossible) > 1 else ""
        problem = f"cannot be carried over: {impossible[0].how}{more}"
        raise SpecError(impossible[0].b or "", problem, "--redraw initializes such tensors")
    before = {d.path: tensor_at(model, d.path).detach() for d in declared(model.part) if d.weight.stored}
    weights = list(model.parameters())
    dtype, device = functools.reduce(torch.promote_types, {weight.dtype for weight in weights}), weights[0].device
    grafted = on_meta(spec, dtype)
    tensors = apply(result, before, _initial_weights(result, before, dtype, device, seed))
    grafted.load_state_dict(tensors, assign=True, strict=False)
    set_constants(grafted, spec, dtype, device)
    tie(grafted, spec)
    return Grafted(grafted, result)


def _initial_weights(
    result: Diff, before: dict[str, Tensor], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Path -> initial value of every stored tensor of b, in the dtype of the tensor of a that it comes from, if any. For one
    that is kept it is a single number expanded to the shape: it takes no memory, and the tensor of a replaces it."""
    rows = {row.b: row for row in result.tensors if row.a is not None and row.b is not None}

    def initial_weight(d: Declared) -> Tensor:
        row = rows.get(d.path)
        if row is None or row.a is None:
            return initial(d, seed).to(device, at_least_fp32(dtype) if d.weight.buffer else dtype)
        dtype_of_a = before[row.a].dtype
        if row.status in ("kept", "reinterpreted"):
            return torch.zeros((), dtype=dtype_of_a, device=device).expand(d.weight.shape(d.scope))
        return initial(d, seed).to(device, dtype_of_a)

    return {d.path: initial_weight(d) for d in declared(result.b) if d.weight.stored}
