"""Whether two sides hold the same numbers: said only where nothing else explains why they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.core.errors import DovetailError
from dovetail.core.fold import declared
from dovetail.model import Model
from dovetail.port.dialect import DIALECTS
from dovetail.port.hf import import_tensors
from dovetail.verification.sides import Local

MOST = 8  # tensors that are named


class Apart(NamedTuple):
    """A tensor that differs."""

    path: str
    gap: float  # of the largest number
    how: str


def apart(a: Local, b: Local) -> list[Apart]:
    """The tensors that differ, by our names, where those of both sides can be told; the first few."""
    spec = a.spec or b.spec
    one, other = (None if spec is None else held(side, spec) for side in (a, b))
    if one is None or other is None:
        return []
    differ = [path for path in one if not one[path].equal(other[path])]
    return [_said(path, one[path], other[path]) for path in differ[:MOST]]


def held(side: Local, spec: Model) -> Mapping[str, Tensor] | None:
    """The tensors a side holds, by our names; None where its names are neither ours nor a family's that we know."""
    state = {name: tensor.detach() for name, tensor in side.made(torch.float64).state_dict().items()}
    paths = [d.path for d in declared(spec) if d.weight.stored]
    if all(path in state for path in paths):
        return {path: state[path] for path in paths}
    for family in DIALECTS:
        try:
            return import_tensors(spec, state, family)
        except DovetailError:
            continue
    return None


def _said(path: str, x: Tensor, y: Tensor) -> Apart:
    if x.shape != y.shape:
        return Apart(path, 1.0, f"{list(x.shape)} in A, {list(y.shape)} in B")
    size = x.abs().max().clamp_min(1e-30)
    gap = ((x - y).abs().max() / size).item()
    share = (x != y).double().mean().item()
    how = "zero in B" if not bool(y.any()) else "zero in A" if not bool(x.any()) else f"{share:.0%} of the numbers differ"
    return Apart(path, gap, how)
