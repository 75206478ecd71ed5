"""Change the spec of a model: keep and transform the weights that the diff allows, initialize the new ones.

    result = graft(model, changed(model.part, ["layers.*.mixer.kv_heads=1"]))
    result.model, result.diff                    the new model, and the status of each tensor

A weight that is kept is not copied: both models share it, so train only one of them. A weight that is kept or moved is never
initialized first, so a large model needs no more memory and time than the weights that change.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.construction import initial, on_meta, set_constants, tie
from dovetail.core.errors import SpecError
from dovetail.core.fold import Declared, declared
from dovetail.core.module import at_least_fp32, tensor_at
from dovetail.model import Model, ModelModule
from dovetail.weights.surgery import Diff, apply, diff


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
