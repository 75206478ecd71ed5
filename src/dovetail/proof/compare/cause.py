"""Find why two implementations diverge, by trial: change the known model in one way after the other (candidates.py) at the
first place where the two differ, on the input on which both still agree. The change with which it gives the other side's
output is the cause.

    x (both agree) ── layer, changed ── y        |y − theirs| vanishes        =>        theirs is ours with this change

Only one layer runs, so the cost of a trial does not depend on the depth. First the unchanged layer must give its output in the
whole model; where it does not, no cause is claimed. Where no candidate explains a difference, the weights of the two sides are
compared.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import DovetailError
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import import_tensors
from dovetail.model.model import Model
from dovetail.nn.finite import nonfinite
from dovetail.proof.compare.candidates import UNRUNNABLE, Candidate
from dovetail.proof.compare.comparison import EXACT, relative_gap, row_scale
from dovetail.proof.compare.match import layer_of
from dovetail.proof.compare.piece import CauseSearch, EmbeddingPiece, HeadPiece, LayerPiece, ModelPiece
from dovetail.proof.compare.sides import Side
from dovetail.spec.fold import declared

REMAINING = 1e-7  # the largest gap that may remain with the right change,
FRACTION = 1e-3  # and the largest fraction of the gap before it
FLOOR = 1e-11
# where the other side is recorded in a narrower dtype than float64:
ROUNDED = 300.0  # the largest gap that may remain in a layer, in units of the dtype's epsilon,
ROUNDED_FRACTION = 0.3  # and the largest fraction of the gap before it
ALIKE = 1.5  # candidates that leave at most this times the least gap cannot be told apart


@dc.dataclass(frozen=True)
class Cause:
    """An explanation of a gap."""

    name: str
    description: str
    remaining: float  # of the gap, with the change
    tried: int
    side: str = "a"  # the side whose model was changed


def find_cause(search: CauseSearch, address: str, tables: Callable[[], Mapping[str, Tensor]] = dict) -> Cause | None:
    """The change that explains why the other side differs at an address; None where no candidate does. `tables` gives the
    tensors of the other side."""
    where = layer_of(address)
    if where == "embed" or address == "layers.0.in":
        return _try_candidates(EmbeddingPiece(search), address)
    if where == "head":
        return _try_candidates(HeadPiece(search, tables()), address)
    if where.startswith("encoder."):
        return None
    return _try_candidates(LayerPiece(search, where), address.removeprefix(where).lstrip("."))


def _try_candidates(piece: ModelPiece, tap: str) -> Cause | None:
    """The first candidate that leaves next to nothing of the gap. Of a rounded recording, of which something is always left:
    of those that leave no more than rounding, and no large part, one that leaves about as little as any and acts nearest to
    the tap."""
    target, unchanged, noise = piece.target(), Candidate("", "", "", piece.part), piece.search.noise
    if target is None or piece.source() is None:
        return None
    gap = _gap_with(piece, unchanged, target)
    if noise:
        if gap is None:
            return None
        allowed = min(ROUNDED * noise, ROUNDED_FRACTION * gap)
    else:
        before = _gap_with(piece, unchanged, piece.own())
        if before is None or before > REMAINING:
            return None  # the piece alone does not give its output in the whole model
        allowed = REMAINING if gap is None else max(FLOOR, min(REMAINING, FRACTION * gap))
    tried, found = 0, list[tuple[float, Candidate]]()
    for candidate in sorted(piece.candidates(), key=lambda one: _distance(one, tap)):
        remaining = _gap_with(piece, candidate, target)
        tried += remaining is not None
        if remaining is not None and remaining <= allowed:
            found.append((remaining, candidate))
            if not noise:
                break
    if not found:
        return _fit_factor(piece, allowed, tried)
    least = min(remaining for remaining, _ in found)
    remaining, best = next(one for one in found if one[0] <= ALIKE * least)
    return Cause(best.cause, best.description, remaining, tried)


def _distance(candidate: Candidate, tap: str) -> int:
    """0 for a candidate that acts on the module at the tap, 1 for one in the same branch, 2 for others."""
    branch, module = tap.partition(".")[0], tap.removesuffix(".in")
    if candidate.place.startswith(module) and module:
        return 0
    nearby = {branch, "norm"} if branch.endswith("norm") else {branch}
    return 1 if candidate.place.partition(".")[0] in nearby else 2


@torch.no_grad()
def _gap_with(piece: ModelPiece, candidate: Candidate, target: Tensor | None) -> float | None:
    """The gap between a changed piece and the target; None where the piece cannot be built or run."""
    if target is None:
        return None
    try:
        model = piece.build(candidate)
        if model is None:
            return None
        y = piece.run(model)
    except UNRUNNABLE:
        return None
    if target.numel() != y.numel():
        return None
    target = target.to(EXACT).reshape(y.shape)
    return relative_gap(y, target, row_scale(target))


def _fit_factor(piece: ModelPiece, allowed: float, tried: int) -> Cause | None:
    """A cause that no candidate covers: the output times a constant."""
    source, target = piece.own(), piece.target()
    if source is None or target is None or source.numel() != target.numel():
        return None
    x, y = source.to(EXACT).flatten(), target.to(EXACT).flatten()
    factor = (x @ y / (x @ x)).item()
    remaining = ((y - factor * x).norm() / y.norm()).item()
    if not remaining <= max(allowed, FLOOR):
        return None
    return Cause(piece.factor_name, f"times {factor:.6g}{_as_root(factor, piece.search.spec.width)}", remaining, tried)


def _as_root(factor: float, width: int) -> str:
    for text, value in (("√width", width**0.5), ("1/√width", width**-0.5), ("width", float(width))):
        if abs(factor / value - 1) < 1e-6:
            return f" ({text})"
    return ""


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
