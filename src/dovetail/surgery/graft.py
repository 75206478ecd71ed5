"""A model turned into another: what the specs' difference keeps or carries over, and first values for what is new.

    made = graft(model, changed(model.part, ["layers.*.mixer.kv_heads=1"]))
    made.model, made.diff                        the new model, and the fate of each tensor

What is kept without a change is not copied: both models hold it, so train only one of them. A weight that is only moved or
kept is never drawn first, so that a large model takes no more memory and time than what really changes.
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
from dovetail.surgery import Diff, apply, diff


class Grafted(NamedTuple):
    """A model of the new spec, and what became of each tensor."""

    model: ModelModule
    diff: Diff


def graft(
    model: ModelModule, spec: Model, *, picks: Sequence[int] | None = None, redraw: bool = False, seed: int = 0
) -> Grafted:
    """The model as `spec` has it. Layers go over by their number, or layer picks[j] becomes layer j. A tensor for which no map
    is known raises SpecError with its path, or is drawn anew where `redraw` says so; what is new is drawn from (seed, path)."""
    found = diff(model.part, spec, picks)
    lost = [row for row in found.tensors if row.fate == "impossible"]
    if lost and not redraw:
        more = f" (and {len(lost) - 1} tensors more)" if len(lost) > 1 else ""
        raise SpecError(lost[0].b or "", f"cannot be carried over: {lost[0].how}{more}", "--redraw starts such tensors anew")
    before = {d.path: tensor_at(model, d.path).detach() for d in declared(model.part) if d.weight.stored}
    weights = list(model.parameters())
    dtype, device = functools.reduce(torch.promote_types, {weight.dtype for weight in weights}), weights[0].device
    made = on_meta(spec, dtype)
    made.load_state_dict(apply(found, before, _first_values(found, before, dtype, device, seed)), assign=True, strict=False)
    set_constants(made, spec, dtype, device)
    tie(made, spec)
    return Grafted(made, found)


def _first_values(
    found: Diff, before: dict[str, Tensor], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Path -> first value of every stored tensor of b, in the dtype of the tensor of a that comes there, if one does. One that
    is kept is a single number spread over the shape: it takes no memory, and a tensor of a takes its place."""
    came = {row.b: row for row in found.tensors if row.a is not None and row.b is not None}

    def first(d: Declared) -> Tensor:
        row = came.get(d.path)
        if row is None or row.a is None:
            return initial(d, seed).to(device, at_least_fp32(dtype) if d.weight.buffer else dtype)
        kind = before[row.a].dtype
        if row.fate in ("kept", "kept_reader_changed"):
            return torch.zeros((), dtype=kind, device=device).expand(d.weight.shape(d.scope))
        return initial(d, seed).to(device, kind)

    return {d.path: first(d) for d in declared(found.b) if d.weight.stored}
