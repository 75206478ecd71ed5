"""Cause: why two implementations part, found by trying. The model of the side that is known is altered in one way after the
other (alter.py) at the first place where the two differ, given the input that both still agree on; the alteration with which it
gives the other side's output is the cause.

    x (both agree) ── layer, altered ── y        |y − theirs| vanishes        =>        theirs is ours, altered so

Only the layer is run, so a trial costs what a layer costs, whatever the depth. First the unaltered layer must give what it gave
in the whole model; where it does not, nothing is claimed.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dovetail.core.errors import DovetailError
from dovetail.verification.alter import Alteration
from dovetail.verification.match import layer_of
from dovetail.verification.piece import Back, Front, Layer, Piece, Scene
from dovetail.verification.walk import EXACT, gap, scale

SURE = 1e-7  # what is left of a gap that an alteration explains, at most; and at most this share of it:
SHARE = 1e-3
FLOOR = 1e-11


@dc.dataclass(frozen=True)
class Cause:
    """What explains a gap."""

    name: str
    says: str
    left: float  # of the gap, with the alteration
    tried: int
    side: str = "a"  # the side whose model was altered


def find(scene: Scene, address: str, tables: Callable[[], Mapping[str, Tensor]] = dict) -> Cause | None:
    """The alteration that explains why the other side differs at an address; None where none does. `tables` gives the other
    side's own tensors."""
    where = layer_of(address)
    if where == "embed" or address == "layers.0.in":
        return _tried(Front(scene), address)
    if where == "head":
        return _tried(Back(scene, tables()), address)
    return None if where.startswith("encoder.") else _tried(Layer(scene, where), address.removeprefix(where).lstrip("."))


def _tried(piece: Piece, tap: str) -> Cause | None:
    target = piece.target()
    if target is None or piece.source() is None:
        return None
    before = _gap_with(piece, Alteration("", "", piece.part), piece.own())
    if before is None or before > SURE:
        return None  # the piece alone does not give what it gave in the model
    whole = _gap_with(piece, Alteration("", "", piece.part), target)
    enough = SURE if whole is None else max(FLOOR, min(SURE, SHARE * whole))
    tried = 0
    for alteration in sorted(piece.alterations(), key=lambda one: _far(one, tap)):
        left = _gap_with(piece, alteration, target)
        tried += left is not None
        if left is not None and left <= enough:
            return Cause(alteration.cause, alteration.says, left, tried)
    return _fitted(piece, enough, tried)


def _far(alteration: Alteration, tap: str) -> int:
    """How far an alteration acts from the tap at which the sides part: on that very module, in the same branch, elsewhere."""
    place = alteration.says.partition(" ")[0].rstrip(":")
    branch, module = tap.partition(".")[0], tap.removesuffix(".in")
    if place.startswith(module) and module:
        return 0
    nearby = {branch, "norm"} if branch.endswith("norm") else {branch}
    return 1 if place.partition(".")[0] in nearby else 2


@torch.no_grad()
def _gap_with(piece: Piece, alteration: Alteration, target: Tensor | None) -> float | None:
    """How far an altered piece is from the target; None where it cannot be made or run."""
    if target is None:
        return None
    try:
        made = piece.made(alteration)
        if made is None:
            return None
        y = piece.run(made)
    except (DovetailError, RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError, KeyError):
        return None  # what cannot be built or run is no candidate
    target = target.to(EXACT).reshape(y.shape) if target.numel() == y.numel() else None
    return None if target is None else gap(y, target, scale(target))


def _fitted(piece: Piece, enough: float, tried: int) -> Cause | None:
    """A cause that no list holds: a factor."""
    source, target = piece.own(), piece.target()
    if source is None or target is None or source.numel() != target.numel():
        return None
    x, y = source.to(EXACT).flatten(), target.to(EXACT).flatten()
    factor = (x @ y / (x @ x)).item()
    left = ((y - factor * x).norm() / y.norm()).item()
    if not left <= max(enough, FLOOR):
        return None
    return Cause(piece.factor_name, f"times {factor:.6g}{_as_root(factor, piece.scene.spec.width)}", left, tried)


def _as_root(factor: float, width: int) -> str:
    for text, value in (("√width", width**0.5), ("1/√width", width**-0.5), ("width", float(width))):
        if abs(factor / value - 1) < 1e-6:
            return f" ({text})"
    return ""
