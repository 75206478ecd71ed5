"""Wirings: legal specs in which every pair of declared sample values stands together at least once.

A **factor** is a place and a value: a field with one of its part's `samples()`, or a slot with one of the registered kinds. A
place names the kinds above it (`model/layers=block/mixer=attention/position=rope/base`), so a stranger's part is tried too.
The pairs: two factors of one part; a factor of a part and one of a part directly inside it; a factor and any kind inside its
part, or in a slot of its block (or, outside the layers, of the model); and of kinds also one in a slot of the model with any
in a block. Left out are pairs deep inside two unrelated parts: a router's activation and a rotation's scaling. Specs are drawn
at random with an uncovered pair pinned in each layer, and the one of several draws that covers most is kept. A value for which
no draw passes `check` cannot stand there, and a pair likewise; both are counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dovetail.core.group import Mask
from dovetail.core.part import KINDS, Part, walk
from dovetail.lawbook.sample import BLOCK, LAYERS, attempt, candidates, fields, sampled
from dovetail.model import Block, Model

TRIES = 10
CROWDED = 5  # tries with something pinned in every layer; two pins may not go together, so the rest leave the others free
CANDIDATES = 3


class Factor(NamedTuple):
    """A value at a place; `kind` where the value is the kind of part that fills the place."""

    place: str
    value: str
    kind: bool

    @property
    def node(self) -> str:
        """The part whose field this is."""
        return self.place.rpartition("/")[0]

    @property
    def in_block(self) -> bool:
        """Whether it belongs to a layer, rather than to the model around them."""
        return self.place.startswith(BLOCK)


Pair = tuple[Factor, Factor]


# -- what a spec has ----------------------------------------------------------------------------------------------------


def factors(part: Part, node: str) -> Iterator[Factor]:
    """The factors of a part and of the parts inside it."""
    for name, group, _ in fields(part.kind):
        value = getattr(part, name)
        place = f"{node}/{name}"
        if name in sampled(part.kind):
            if repr(value) in sampled(part.kind)[name]:
                yield Factor(place, repr(value), False)
        elif group is not None and value is None:
            yield Factor(place, "None", True)
        elif isinstance(value, Part) and not isinstance(value, Model):
            inside = _unjoined(value)
            yield Factor(place, inside.kind, True)
            yield from factors(inside, f"{place}={inside.kind}")


def _unjoined(part: Part) -> Part:
    """The mask that was joined with causal to suit a decoder."""
    if isinstance(part, Mask):
        inside = tuple(part.parts().values())
        if len(inside) == 2 and inside[0] == KINDS["causal"]() and part.kind not in ("by_head",):
            return inside[1]
    return part


def scopes(spec: Model) -> Iterator[set[Factor]]:
    """The factors that meet: those of the model with those of each of its layers; an encoder likewise."""
    top = set(factors(spec, "model"))
    for block in spec.layers:
        yield top | set(factors(block, BLOCK))
    if spec.encoder is not None:
        yield from scopes(spec.encoder)


def pairs_of(spec: Model) -> set[Pair]:
    """Every pair that stands together in a spec."""
    return {pair for scope in scopes(spec) for pair in meeting(scope)}


def meeting(scope: Iterable[Factor]) -> Iterator[Pair]:
    """The pairs among factors that must be tried."""
    everything = sorted(scope)
    kinds = [factor for factor in everything if factor.kind]
    by_node: dict[str, list[Factor]] = {}
    for factor in everything:
        if not factor.kind:
            by_node.setdefault(factor.node, []).append(factor)
    yield from (pair for pair in itertools.combinations(kinds, 2) if pair[0].place != pair[1].place and _near(*pair))
    for node, own in by_node.items():
        whole = BLOCK if node.startswith(BLOCK) else "model"
        near = [kind for kind in kinds if kind.node in (whole, node) or kind.node.startswith(f"{node}/")]
        yield from ((min(a, b), max(a, b)) for a in own for b in near)
        yield from (pair for pair in itertools.combinations(own, 2) if pair[0].place != pair[1].place)
        above = by_node.get(node.rpartition("/")[0], ())
        yield from ((min(a, b), max(a, b)) for a in own for b in above)


def _near(one: Factor, other: Factor) -> bool:
    """Whether one of two kinds fills a slot of the block or of the model, or stands beside or inside the other's part."""
    inner, outer = sorted((one.node, other.node), key=len, reverse=True)
    return not {inner, outer}.isdisjoint({BLOCK, "model"}) or f"{inner}/".startswith(f"{outer}/")


# -- covering ------------------------------------------------------------------------------------------------------------


def all_factors() -> list[Factor]:
    """Every factor there could be, from the registry and the samples."""
    return sorted({*_possible("model", "model"), *_possible("block", BLOCK)})


def _possible(kind: str, node: str) -> Iterator[Factor]:
    for name, group, empty in fields(kind):
        place = f"{node}/{name}"
        if name in sampled(kind):
            yield from (Factor(place, text, False) for text in sampled(kind)[name])
        elif group is not None and not issubclass(group, (Block, Model)):
            for inside in candidates(group, kind, name, empty):
                yield Factor(place, inside, True)
                # a mask of masks is drawn from its samples, not from every mask again
                if inside != "None":
                    yield from _possible(inside, f"{place}={inside}")


def pins(*wanted: Factor) -> dict[str, str]:
    """Places to values that bring the factors about: their own, and the kinds above them."""
    pinned: dict[str, str] = {}
    for factor in wanted:
        pinned[factor.place] = factor.value
        pieces = factor.node.split("/")
        for i, piece in enumerate(pieces[1:], 1):
            name, _, kind = piece.partition("=")
            pinned["/".join([*pieces[:i], name])] = kind
    return pinned


def consistent(a: Factor, b: Factor) -> bool:
    """Whether no slot would have to hold two kinds at once."""
    one, other = pins(a), pins(b)
    return all(other.get(place, value) == value for place, value in one.items())


class PairCover:
    """Draws specs until every pair is covered; iterate to get them as they come, then read how well they cover."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.specs: dict[str, Model] = {}
        self.covered: set[Pair] = set()
        self.met: set[Factor] = set()
        self.wanted: list[Pair] = []
        self.impossible_factors: list[Factor] = []
        self.impossible_pairs: list[Pair] = []

    def coverage(self) -> float:
        """The share of the pairs that can be wired which some spec holds."""
        found = sum(pair in self.covered for pair in self.wanted)
        unwired = sum(pair not in self.covered for pair in self.impossible_pairs)  # a later draw may have brought one about
        return found / (len(self.wanted) - unwired) if self.wanted else 0.0

    def __iter__(self) -> Iterator[Model]:
        yield from self.each_value()
        possible = [factor for factor in all_factors() if factor in self.met]
        self.wanted = sorted({pair for pair in meeting(possible) if consistent(*pair)})
        todo = list(self.wanted)
        self.chance.shuffle(todo)
        others = iter([pair for pair in todo if all(factor.in_block for factor in pair)])
        for pair in todo:
            if pair in self.covered:
                continue
            free = (pins(*other) for other in others if other != pair and other not in self.covered)
            spec = self.best(pins(*pair), set(pair), tuple(itertools.islice(free, LAYERS - 1)))
            if spec is None:
                self.impossible_pairs.append(pair)
            else:
                yield self.keep(spec)

    def each_value(self) -> Iterator[Model]:
        """Specs that hold every value once: what never comes about cannot stand there."""
        for factor in all_factors():
            if factor in self.met:
                continue
            spec = self.best(pins(factor), {factor})
            if spec is None:
                self.impossible_factors.append(factor)
            else:
                yield self.keep(spec)

    def keep(self, spec: Model) -> Model:
        """Count a spec in."""
        self.specs[spec.key] = spec
        self.covered.update(pairs_of(spec))
        self.met.update(*scopes(spec))
        return spec

    def best(self, pinned: dict[str, str], wanted: set[Factor], later: tuple[dict[str, str], ...] = ()) -> Model | None:
        """Of several legal draws that really hold the wanted factors, the one that covers most new pairs."""
        sound: list[Model] = []
        excepted: list[Model] = []
        for i in range(TRIES):
            spec = attempt(self.chance, pinned, later if i < CROWDED else ())
            if spec is None or not any(wanted <= scope for scope in scopes(spec)):
                continue
            (excepted if any(part.excepts(scope) for _, part, scope in walk(spec)) else sound).append(spec)
            if len(sound) == CANDIDATES:
                break
        # a spec for which some law cannot hold says less: only where what is wanted asks for it
        return max(sound or excepted, key=lambda spec: len(pairs_of(spec) - self.covered), default=None)


def quick_specs(seed: int = 0, count: int = 16) -> list[Model]:
    """A few specs that hold every kind at least once, if that many can."""
    chance, left = random.Random(seed), {(f.place, f.value) for f in all_factors() if f.kind}
    chosen: list[Model] = []
    while len(chosen) < count:
        drawn = [spec for _ in range(30) if (spec := attempt(chance, {})) is not None]
        held = {spec.key: {(f.place, f.value) for scope in scopes(spec) for f in scope if f.kind} for spec in drawn}
        best = max(drawn, key=lambda spec: len(held[spec.key] & left))
        left -= held[best.key]
        chosen.append(best)
    return chosen
