"""The status of each tensor between two specs, from the declarations of parts: paths, named axes, ties and fields.

    kept            the same path, axes and sizes, used as before
    reinterpreted   the same numbers, used in another way (RoPE -> ALiBi for queries and keys, a window, an activation)
    transformed     the numbers are carried over by a map that preserves their meaning: KV heads pooled or repeated (Ainslie
                    et al. 2023), rows added or removed, q, k and v packed or split, a tie undone, a norm's scale stored as an
                    offset from 1 or not, a layer moved or repeated
    new, dropped    only in b, only in a
    impossible      in both, but no such map is known (another width, another number of heads)

A row is one tensor of a and one of b: a tensor that goes to three has three rows.
"""

from __future__ import annotations

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import lcm
from typing import Any, Literal, NamedTuple, get_args

from dovetail.account import format_value
from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.spec.check import check
from dovetail.spec.weight import KV_HEADS, Weight
from dovetail.weights.surgery.change import ChangedField, changes, sizes
from dovetail.weights.surgery.resize import came_from, picked
from dovetail.weights.surgery.tensors import Content, Tensor, tensors

Status = Literal["kept", "reinterpreted", "transformed", "new", "dropped", "impossible"]


class AxisStep(NamedTuple):
    """One step along an axis: repeat each entry `repeat` times, then average every `mean`; then add `add`."""

    axis: str = ""
    repeat: int = 1
    mean: int = 1
    add: float = 0.0


class PieceMove(NamedTuple):
    """How a piece of a tensor of b is computed from a piece of one of a (None: all of it)."""

    from_piece: int | None
    to_piece: int | None
    stored: dict[str, int]  # axes of a's tensor
    axes: dict[str, int]  # axes of its piece
    steps: tuple[AxisStep, ...]


@dc.dataclass(frozen=True)
class DiffRow:
    """One tensor of a, one of b, and how the first becomes the second."""

    a: str | None
    b: str | None
    status: Status
    how: str
    shapes: dict[str, tuple[int, ...]]  # "a" and "b", where there is one
    moves: tuple[PieceMove, ...] = ()


@dc.dataclass(frozen=True)
class Diff:
    """Two specs compared."""

    a: Model
    b: Model
    tensors: tuple[DiffRow, ...]
    change: tuple[ChangedField, ...]

    @property
    def summary(self) -> dict[Status, int]:
        """The number of rows of each status."""
        counts = Counter(row.status for row in self.tensors)
        return {status: counts[status] for status in get_args(Status)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {"a": r.a, "b": r.b, "status": r.status, "how": r.how, "shapes": {k: list(v) for k, v in r.shapes.items()}}
            for r in self.tensors
        ]
        change = [{"path": c.path, "a": c.a, "b": c.b} for c in self.change]
        return {"tensors": rows, "summary": self.summary, "change": change}


def diff(a: Model, b: Model, picks: Sequence[int] | None = None) -> Diff:
    """Compare two specs, each checked first. Layers are compared by their number, or layer j of b with layer picks[j] of a."""
    check(a)
    check(b)
    if picks is not None and len(picks) != len(b.layers):
        raise SpecError("layers", f"{len(picks)} layers are picked, but the spec has {len(b.layers)}")
    reordered = a if picks is None else picked(a, picks)  # a, its layers in the order of b's
    change = changes(reordered, b)
    of_a, of_b, of_reordered = tensors(a), tensors(b), tensors(reordered)
    sources: dict[str, Content] = {}
    for tensor in of_reordered.values():
        stored = of_a[came_from(tensor.path, picks)].owner
        sources |= {path: content._replace(stored=stored) for path, content in tensor.contents()}
    tied: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in of_b.values():
        if tensor.weight.same_as is not None:
            tied[tensor.owner].append(tensor)
    reinterpreting = [c for c in change if c.reinterprets]
    rows: list[DiffRow] = []
    for tensor in of_b.values():
        if tensor.weight.same_as is None:
            reasons = _reasons(tensor, tied[tensor.path], of_reordered, reinterpreting)
            rows += _rows_into(tensor, came_from(tensor.path, picks), sources, of_a, reasons)
    used = {row.a for row in rows}
    successors = {came_from(path, picks): tensor for path, tensor in of_b.items()}
    rows += [_dropped(tensor, successors) for tensor in of_a.values() if tensor.weight.learned and tensor.path not in used]
    if picks is not None and list(picks) != list(range(len(a.layers))):
        change = [ChangedField("layers", list(range(len(a.layers))), list(picks), False), *change]
    return Diff(a, b, tuple(rows), tuple(change))


def _reasons(tensor: Tensor, tied: list[Tensor], before: dict[str, Tensor], change: list[ChangedField]) -> list[str]:
    """Why this tensor is reinterpreted: changed fields that act on it or on a weight tied to it, and new ties."""
    reasons: dict[str, None] = {}
    for user in (tensor, *tied):
        for c in change:
            if user.reinterpreted_by(c.path):
                reasons[f"{c.path.removeprefix(user.branch.home).lstrip('.')}: {format_value(c.a)} → {format_value(c.b)}"] = (
                    None
                )
        if user is not tensor and user.path in before and before[user.path].owner != tensor.path:
            reasons[f"{user.path} is tied to it"] = None
    return list(reasons)


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows_into(
    tensor: Tensor, was_at: str, sources: dict[str, Content], of_a: dict[str, Tensor], reasons: list[str]
) -> list[DiffRow]:
    """The rows of one tensor of b, which was at `was_at` in a: one for each tensor of a that goes into it."""
    pairs = [(content, sources[path]) for path, content in tensor.contents() if path in sources]
    if not pairs:
        return [DiffRow(None, tensor.path, "new", "initialized", {"b": tensor.shape})]
    obstacles = [obstacle for target, source in pairs for obstacle in _obstacles(source, target)]
    if obstacles:
        stored = dict.fromkeys(source.stored for _, source in pairs)
        return [_row(of_a[path], tensor, "impossible", "; ".join(dict.fromkeys(obstacles))) for path in stored]
    rows: list[DiffRow] = []
    reinterpreted = [f"reinterpreted: {'; '.join(reasons)}"] if reasons else []
    for stored in dict.fromkeys(source.stored for _, source in pairs):
        moves, words = [], _moved_words(tensor, was_at, of_a[stored])
        for target, source in pairs:
            if source.stored == stored:
                steps, step_words = _steps(source, target)
                moves.append(
                    PieceMove(source.piece, target.piece, sizes(source.weight, of_a[stored].scope), source.axes, steps)
                )
                words += step_words
        status: Status = "transformed" if words else "reinterpreted" if reasons else "kept"
        rows.append(_row(of_a[stored], tensor, status, "; ".join(dict.fromkeys(words + reinterpreted)), tuple(moves)))
    return rows


def _row(a: Tensor, b: Tensor, status: Status, how: str, moves: tuple[PieceMove, ...] = ()) -> DiffRow:
    return DiffRow(a.path, b.path, status, how, {"a": a.shape, "b": b.shape}, moves)


def _moved_words(b: Tensor, was_at: str, a: Tensor) -> list[str]:
    """A few words where the numbers move to another path."""
    if a.path == was_at:
        return [] if b.path == was_at else ["taken from another layer"]
    if a.weight.packs and not b.weight.packs:
        return [f"split from {a.weight.name}"]
    if b.weight.packs and not a.weight.packs:
        return [f"packed into {b.weight.name}"]
    return [f"a copy of {a.path} of its own"]


def _obstacles(source: Content, target: Content) -> list[str]:
    """Why no map is known from one to the other."""
    if list(source.axes) != list(target.axes):
        return [f"over ({', '.join(source.axes)}) in a, ({', '.join(target.axes)}) in b"]
    differ = [axis for axis in source.axes if source.axes[axis] != target.axes[axis]]
    bad = [axis for axis in differ if axis not in target.resizable and not (axis == KV_HEADS and source.heads == target.heads)]
    return [f"{axis} {source.axes[axis]} → {target.axes[axis]}" for axis in bad]


def _steps(source: Content, target: Content) -> tuple[tuple[AxisStep, ...], list[str]]:
    """The steps along each axis, and the same in words."""
    steps: list[AxisStep] = []
    words: list[str] = []
    for axis, old in source.axes.items():
        new = target.axes[axis]
        if old == new:
            continue
        if axis in target.resizable:
            words.append(f"{axis}: {f'{new - old} rows added' if new > old else f'the last {old - new} rows removed'}")
            continue
        common = lcm(old, new)  # each old head serves the same queries as before, or shares them
        repeat, mean = common // old, common // new
        steps.append(AxisStep(axis, repeat, mean))
        parts = [f"each repeated {repeat} times"] * (repeat > 1) + [f"the mean of every {mean}"] * (mean > 1)
        words.append(f"{axis} {old} → {new}: {', then '.join(parts)}")
    offset = _neutral(target.weight) - _neutral(source.weight)
    if offset:
        steps.append(AxisStep(add=offset))
        words.append(f"{offset:+g}: the neutral scale was {_neutral(source.weight):g}, now {_neutral(target.weight):g}")
    return tuple(steps), words


def _neutral(weight: Weight) -> float:
    """The value of a norm's scale that leaves a token unchanged: its initial value."""
    return 1.0 if weight.role == "norm" and weight.init == "ones" else 0.0


def _dropped(tensor: Tensor, successors: dict[str, Tensor]) -> DiffRow:
    """A tensor of a that no tensor of b is computed from; `successors` are b's tensors by where they were in a."""
    tied = successors.get(tensor.path)
    how = "not in b" if tied is None else f"{tied.owner} takes its place"
    return DiffRow(tensor.path, None, "dropped", how, {"a": tensor.shape})
