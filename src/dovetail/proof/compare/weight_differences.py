"""Compare the weights of two sides: reported where no other cause explains a difference; and find weights that are not
finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.core.errors import DovetailError
from dovetail.core.finite import nonfinite
from dovetail.core.fold import declared
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import import_tensors
from dovetail.model import Model
from dovetail.proof.compare.sides import Side

MOST = 8  # tensors that are listed


class WeightDifference(NamedTuple):
    """A tensor that differs between the sides."""

    path: str
    gap: float  # relative to the largest absolute value
    how: str


def nonfinite_weights(side: Side) -> list[str]:
    """The first few parameters of a side that hold NaN or infinity, by their own names."""
    weights = side.module(side.dtype).named_parameters()
    return [name for name, weight in weights if nonfinite(weight)][:MOST]


def weight_differences(a: Side, b: Side) -> list[WeightDifference]:
    """The first few tensors that differ, by our paths; empty where the names of a side cannot be mapped to ours."""
    spec = a.spec or b.spec
    first, second = (None if spec is None else tensors_by_path(side, spec) for side in (a, b))
    if first is None or second is None:
        return []
    differing = [path for path in first if not first[path].equal(second[path])]
    return [_difference(path, first[path], second[path]) for path in differing[:MOST]]


def tensors_by_path(side: Side, spec: Model) -> Mapping[str, Tensor] | None:
    """The tensors of a side by our paths; None where its names are neither ours nor those of a known family."""
    state = {name: tensor.detach() for name, tensor in side.module(torch.float64).state_dict().items()}
    paths = [d.path for d in declared(spec) if d.weight.stored]
    if all(path in state for path in paths):
        return {path: state[path] for path in paths}
    for family in DIALECTS:
        try:
            return import_tensors(spec, state, family)
        except DovetailError:
            continue
    return None


def _difference(path: str, x: Tensor, y: Tensor) -> WeightDifference:
    if x.shape != y.shape:
        return WeightDifference(path, 1.0, f"{list(x.shape)} in A, {list(y.shape)} in B")
    gap = ((x - y).abs().max() / x.abs().max().clamp_min(1e-30)).item()
    if not bool(y.any()) or not bool(x.any()):
        return WeightDifference(path, gap, "zero in B" if not bool(y.any()) else "zero in A")
    rows = (x != y).reshape(x.shape[0], -1).any(-1)
    changed, total = int(rows.sum()), len(rows)
    if x.dim() > 1 and changed < total:
        return WeightDifference(path, gap, f"{changed} of {total} rows differ")
    return WeightDifference(path, gap, f"{(x != y).double().mean().item():.0%} of the values differ")
