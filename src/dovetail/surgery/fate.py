"""The fate of each tensor between two specs, from what the parts declare: paths, named axes, ties, fields. No kind is asked.

    kept                  the same path, axes and sizes, read as before
    kept_reader_changed   the same numbers, but what reads them reads them another way (RoPE -> ALiBi, a window, an activation)
    transformed           the numbers go over by a map that keeps their meaning: heads pooled or repeated (Ainslie et al. 2023),
                          rows added or cut, q, k and v packed or split, a tie undone, a norm's weight counted from 0 or from 1,
                          a layer at another place, or taken again
    new, dropped          only in b, only in a
    impossible            in both, but no such map is known (another width, another number of heads)

A row is one tensor of a and one of b: a tensor that goes to three has three rows.
"""

from __future__ import annotations

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import lcm
from typing import Any, Literal, NamedTuple, get_args

from dovetail.account import say
from dovetail.core.check import check
from dovetail.core.errors import SpecError
from dovetail.core.part import Part, join
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight
from dovetail.model import Block, Model
from dovetail.surgery.change import PACKED_AXIS, Change, changes, pieces, places, sizes
from dovetail.surgery.pick import came_from, picked

Fate = Literal["kept", "kept_reader_changed", "transformed", "new", "dropped", "impossible"]
ROWS = frozenset({"vocab", "position", "types"})  # axes whose entries stand each for itself: some may go, others come
GROUPS_OF_HEADS = "kv_heads"


class Step(NamedTuple):
    """One move along an axis: each entry `repeat` times, then the mean of every `mean`; then plus `add`."""

    axis: str = ""
    repeat: int = 1
    mean: int = 1
    add: float = 0.0


class Move(NamedTuple):
    """How a piece of a tensor of b is made from a piece of one of a (None: all of it)."""

    from_piece: int | None
    to_piece: int | None
    stored: dict[str, int]  # axes of a's tensor
    axes: dict[str, int]  # axes of the piece of it
    steps: tuple[Step, ...]


@dc.dataclass(frozen=True)
class Row:
    """What becomes of one tensor of a, or where one of b comes from."""

    a: str | None
    b: str | None
    fate: Fate
    how: str
    shapes: dict[str, tuple[int, ...]]  # "a" and "b", where there is one
    moves: tuple[Move, ...] = ()


@dc.dataclass(frozen=True)
class Diff:
    """Two specs compared."""

    a: Model
    b: Model
    tensors: tuple[Row, ...]
    change: tuple[Change, ...]

    @property
    def summary(self) -> dict[Fate, int]:
        """How many rows each fate has."""
        counted = Counter(row.fate for row in self.tensors)
        return {fate: counted[fate] for fate in get_args(Fate)}

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {"a": r.a, "b": r.b, "fate": r.fate, "how": r.how, "shapes": {k: list(v) for k, v in r.shapes.items()}}
            for r in self.tensors
        ]
        change = [{"path": c.path, "a": c.a, "b": c.b} for c in self.change]
        return {"tensors": rows, "summary": self.summary, "change": change}


def diff(a: Model, b: Model, picks: Sequence[int] | None = None) -> Diff:
    """Compare two specs, each checked first. Layers are compared by their number, or layer j of b with layer picks[j] of a."""
    check(a)
    check(b)
    if picks is not None and len(picks) != len(b.layers):
        raise SpecError("layers", f"{len(picks)} layers are picked for the {len(b.layers)} there are")
    stood = a if picks is None else picked(a, picks)  # a, its layers in the order of b's
    change = changes(stood, b)
    there, here, ordered = tensors(a), tensors(b), tensors(stood)
    source: dict[str, Content] = {}
    for tensor in ordered.values():
        stored = there[came_from(tensor.path, picks)].owner
        source |= {path: content._replace(stored=stored) for path, content in tensor.contents()}
    sharing: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in here.values():
        if tensor.weight.same_as is not None:
            sharing[tensor.owner].append(tensor)
    reading = [c for c in change if c.reader]
    rows: list[Row] = []
    for tensor in here.values():
        if tensor.weight.same_as is None:
            stands = came_from(tensor.path, picks)
            rows += _arrivals(tensor, stands, source, there, _readers(tensor, sharing[tensor.path], ordered, reading))
    used = {row.a for row in rows}
    heirs = {came_from(path, picks): tensor for path, tensor in here.items()}
    rows += [_departure(tensor, heirs) for tensor in there.values() if tensor.weight.learned and tensor.path not in used]
    if picks is not None and list(picks) != list(range(len(a.layers))):
        change = [Change("layers", list(range(len(a.layers))), list(picks), False), *change]
    return Diff(a, b, tuple(rows), tuple(change))


# -- the tensors of one spec ----------------------------------------------------------------------------------------


class Content(NamedTuple):
    """Numbers by the name they would have unpacked and untied: where they are stored, as which piece, over which axes."""

    stored: str
    piece: int | None
    axes: dict[str, int]
    heads: int | None
    rows: frozenset[str]  # axes whose size may change
    weight: Weight


class Tensor(NamedTuple):
    """A declared tensor, where it stands, and the places in the spec whose fields say how it is read."""

    path: str
    weight: Weight
    scope: Scope
    home: str  # path of the block or model that holds its branch
    branch: str  # spec path of that branch
    wired: bool
    rows: frozenset[str]  # axes whose entries may come and go

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.weight.shape(self.scope)

    @property
    def owner(self) -> str:
        """Where its numbers are stored."""
        return self.weight.same_as or self.path

    def contents(self) -> list[tuple[str, Content]]:
        """(path, content): itself, or for a packed one its pieces."""
        axes, heads = sizes(self.weight, self.scope), self.scope.sizes.get("heads")
        names = pieces(self.weight)
        if not names:
            return [(self.path, Content(self.owner, None, axes, heads, self.rows, self.weight))]
        above = self.path.removesuffix(self.weight.name)
        rest = {axis: size for axis, size in axes.items() if axis not in (GROUPS_OF_HEADS, PACKED_AXIS)}
        groups, slots = axes[GROUPS_OF_HEADS], axes[PACKED_AXIS]
        counts = [{"heads": groups * (slots - 2)}, {GROUPS_OF_HEADS: groups}, {GROUPS_OF_HEADS: groups}]
        return [
            (above + name, Content(self.owner, i, {**count, **rest}, heads, self.rows, self.weight))
            for i, (name, count) in enumerate(zip(names, counts, strict=True))
        ]


def tensors(spec: Model) -> dict[str, Tensor]:
    """Every learned tensor and every tie, by path."""
    found: dict[str, Tensor] = {}
    stands: dict[str, tuple[str, str, bool]] = {}  # module path -> home, branch, whether a wire joins it to the stream
    images: set[str] = set()  # models whose tokens are no text: the n-th place of a larger image is another place
    for path, part, scope, place in places(spec):
        if isinstance(part, Model) and not part.embed.causal():
            images.add(place)
        stands[path] = _stand(path, part, place, stands)
        home, branch, wired = stands[path]
        rows = ROWS - {"position"} if home in images else ROWS
        for weight in part.weights(scope):
            if weight.role != "const":
                found[join(path, weight.name)] = Tensor(join(path, weight.name), weight, scope, home, branch, wired, rows)
    return found


def _stand(path: str, part: Part, place: str, stands: dict[str, tuple[str, str, bool]]) -> tuple[str, str, bool]:
    """A block or a model begins new branches; what is below one of their children belongs to that child's branch."""
    if isinstance(part, (Block, Model)):
        return place, "", isinstance(part, Block)
    above = path
    while True:
        above = above.rpartition(".")[0]
        if above in stands:
            home, branch, wired = stands[above]
            return home, branch or place, wired


# -- readers --------------------------------------------------------------------------------------------------------


def _readers(tensor: Tensor, sharing: list[Tensor], there: dict[str, Tensor], change: list[Change]) -> list[str]:
    """What reads this tensor another way than before: changed fields of its branch, of the wire, and of whoever shares it."""
    said: dict[str, None] = {}
    for reader in (tensor, *sharing):
        roots = [reader.branch, join(reader.home, "wire")] if reader.wired else [reader.branch]
        for c in change:
            if any(_within(c.path, root) or _within(root, c.path) for root in roots):
                said[f"{c.path.removeprefix(reader.home).lstrip('.')}: {say(c.a)} → {say(c.b)}"] = None
        if reader is not tensor and reader.path in there and there[reader.path].owner != tensor.path:
            said[f"{reader.path} is this one too"] = None
    return list(said)


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


# -- rows -----------------------------------------------------------------------------------------------------------


def _arrivals(
    tensor: Tensor, stood: str, source: dict[str, Content], there: dict[str, Tensor], readers: list[str]
) -> list[Row]:
    """Where one tensor of b, which stood at `stood` in a, comes from: one row for each tensor of a that goes into it."""
    wanted = tensor.contents()
    found = [(content, source[path]) for path, content in wanted if path in source]
    if not found:
        return [Row(None, tensor.path, "new", "drawn anew", {"b": tensor.shape})]
    whys = [why for here, come in found for why in _hindrances(come, here)]
    if whys:
        stored = dict.fromkeys(come.stored for _, come in found)
        return [_row(there[path], tensor, "impossible", "; ".join(dict.fromkeys(whys))) for path in stored]
    rows: list[Row] = []
    read = [f"read differently: {'; '.join(readers)}"] if readers else []
    for stored in dict.fromkeys(come.stored for _, come in found):
        moves, said = [], []
        for here, come in found:
            if come.stored == stored:
                steps, words = _steps(come, here)
                moves.append(Move(come.piece, here.piece, sizes(come.weight, there[stored].scope), come.axes, steps))
                said += words
        said = _routed(tensor, stood, there[stored]) + said
        fate: Fate = "transformed" if said else "kept_reader_changed" if readers else "kept"
        rows.append(_row(there[stored], tensor, fate, "; ".join(dict.fromkeys(said + read)), tuple(moves)))
    return rows


def _row(a: Tensor, b: Tensor, fate: Fate, how: str, moves: tuple[Move, ...] = ()) -> Row:
    return Row(a.path, b.path, fate, how, {"a": a.shape, "b": b.shape}, moves)


def _routed(b: Tensor, stood: str, a: Tensor) -> list[str]:
    """What is to be said where the numbers change their place."""
    if a.path == stood:
        return [] if b.path == stood else ["taken from another layer"]
    packed_a, packed_b = bool(pieces(a.weight)), bool(pieces(b.weight))
    if packed_a and not packed_b:
        return [f"split from {a.weight.name}"]
    if packed_b and not packed_a:
        return [f"packed into {b.weight.name}"]
    return [f"a copy of {a.path} of its own"]


def _hindrances(come: Content, here: Content) -> list[str]:
    """Why no map is known from the one to the other."""
    if list(come.axes) != list(here.axes):
        return [f"over ({', '.join(come.axes)}) there, ({', '.join(here.axes)}) here"]
    differ = [axis for axis in come.axes if come.axes[axis] != here.axes[axis]]
    bad = [axis for axis in differ if axis not in here.rows and not (axis == GROUPS_OF_HEADS and come.heads == here.heads)]
    return [f"{axis} {come.axes[axis]} → {here.axes[axis]}" for axis in bad]


def _steps(come: Content, here: Content) -> tuple[tuple[Step, ...], list[str]]:
    """The moves along each axis, and the same in words."""
    steps: list[Step] = []
    said: list[str] = []
    for axis, old in come.axes.items():
        new = here.axes[axis]
        if old == new:
            continue
        if axis in here.rows:
            said.append(f"{axis}: {f'{new - old} rows more' if new > old else f'the last {old - new} rows cut'}")
            continue
        every = lcm(old, new)  # each old head serves the same queries as before, or shares them
        repeat, mean = every // old, every // new
        steps.append(Step(axis, repeat, mean))
        words = [f"each repeated {repeat} times"] * (repeat > 1) + [f"the mean of every {mean}"] * (mean > 1)
        said.append(f"{axis} {old} → {new}: {', then '.join(words)}")
    moved = _neutral(here.weight) - _neutral(come.weight)
    if moved:
        steps.append(Step(add=moved))
        said.append(f"{moved:+g}: a weight of {_neutral(come.weight):g} did nothing, now {_neutral(here.weight):g} does")
    return tuple(steps), said


def _neutral(weight: Weight) -> float:
    """The number of a norm's weight that leaves a token as it is: what it starts from."""
    return 1.0 if weight.role == "norm" and weight.init == "ones" else 0.0


def _departure(tensor: Tensor, heirs: dict[str, Tensor]) -> Row:
    """A tensor of a that nothing of b is made of; `heirs` are b's tensors by where they stood in a."""
    tied = heirs.get(tensor.path)
    how = "not in b" if tied is None else f"{tied.owner} serves in its place"
    return Row(tensor.path, None, "dropped", how, {"a": tensor.shape})
