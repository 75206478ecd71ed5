"""Pairwise covering: sampled specs in which every pair of sample values that can occur together does so at least once.

A **factor** is a value at a place: a field with one of its part's `samples`, a slot with one of the registered kinds, or a
declaration that holds: a method of a group that answers yes or no (`widens`, `rotates_on_read`), which may follow from several
fields at once. A place names the kinds above it (`model/layers=block/mixer=attention/position=rope/base`), so a user's own part
is covered too.

The pairs to cover: two factors of one part; a factor of a part and one of a part directly inside it; a factor and any kind
inside its part, or in a slot of its block (outside the layers: of the model); two kinds of which one fills a slot of the block
or of the model; a declaration and everything of the part that its own is in: each kind, and each declaration of another part in
it. Pairs deep inside two unrelated parts (a router's activation and a RoPE scaling) are left out.

Specs are sampled at random with an uncovered pair pinned in each layer; of several samples, the one that covers most new pairs
is used. A value or pair for which no sample passes `check` is impossible, and is counted as such.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import NamedTuple

from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.nn.groups import Mask, Mtp
from dovetail.proof.laws.sample import BLOCK, LAYERS, attempt, candidates, fields, sampled
from dovetail.spec.part import KINDS, Part, walk

TRIES = 10
RARE = 100  # tries for the first spec with a declaration: it may follow from several fields at once
CROWDED = 5  # tries with a pair pinned in every layer; two pins may conflict, so the other tries pin the first layer only
CANDIDATES = 3
HOLDS = "()"  # ends the place of a declaration, which is a method of its part


class Factor(NamedTuple):
    """A value at a place; `kind` where the value is the kind of part that fills the place."""

    place: str
    value: str
    kind: bool

    @property
    def node(self) -> str:
        """The place of the part whose field this is."""
        return self.place.rpartition("/")[0]

    @property
    def above(self) -> str:
        """The place of the part that this part is in."""
        return self.node.rpartition("/")[0]

    @property
    def declaration(self) -> bool:
        """Whether it is a declaration that holds."""
        return self.place.endswith(HOLDS)

    @property
    def in_block(self) -> bool:
        """Whether it is inside a layer."""
        return self.place.startswith(BLOCK)


Pair = tuple[Factor, Factor]


# -- the factors of a spec -----------------------------------------------------------------------------------------------


def factors(part: Part, node: str) -> Iterator[Factor]:
    """The factors of a part and of the parts inside it."""
    for name, group, _ in fields(part.kind):
        value = getattr(part, name)
        place = f"{node}/{name}"
        if name in sampled(part.kind):
            if repr(value) in sampled(part.kind)[name]:
                yield Factor(place, repr(value), False)
        elif group is None or issubclass(group, (Block, Model)):
            continue
        elif value in (None, ()):
            yield Factor(place, "None", True)
        else:
            inside = _unjoined(value[0] if isinstance(value, tuple) else value)
            yield Factor(place, inside.kind, True)
            asked = (name for name, scoped in declared_by(type(inside)) if not scoped and getattr(inside, name)())
            yield from (holds(f"{place}={inside.kind}", name) for name in asked)
            yield from factors(inside, f"{place}={inside.kind}")


def _unjoined(part: Part) -> Part:
    """The mask that `sample` joined with causal for a decoder; any other part unchanged."""
    if isinstance(part, Mask):
        inside = tuple(part.parts().values())
        if len(inside) == 2 and inside[0] == KINDS["causal"]() and part.kind not in ("by_head",):
            return inside[1]
    return part


def scopes(spec: Model) -> Iterator[set[Factor]]:
    """The sets of factors that occur together: those of the model with those of each of its layers; an encoder likewise."""
    yield from _scopes(spec, in_scope(spec), "")


def _scopes(spec: Model, declared: dict[str, set[Factor]], path: str) -> Iterator[set[Factor]]:
    top = set(factors(spec, "model")) | declared.get(path, set())
    for i, block in enumerate(spec.layers):
        yield top | set(factors(block, BLOCK)) | declared.get(f"{path}layers.{i}.", set())
    if spec.encoder is not None:
        yield from _scopes(spec.encoder, declared, "encoder.")


def in_scope(spec: Model) -> dict[str, set[Factor]]:
    """The declarations that hold and follow from the scope of a part, too, by the path of its layer (`layers.0.`) or model."""
    nodes: dict[str, tuple[Part, str, str]] = {}  # by path: the part, its place, and the path of its layer or model
    holding: dict[str, set[Factor]] = {}
    for path, part, scope in walk(spec):
        above, _, name = path.rpartition(".")
        if isinstance(part, (Block, Model)):
            nodes[path] = part, BLOCK if isinstance(part, Block) else "model", f"{path}." if path else ""
        elif above in nodes and name in nodes[above][0].parts():
            _, node, stack = nodes[above]
            nodes[path] = part, f"{node}/{name}={part.kind}", stack
            names = [name for name, scoped in declared_by(type(part)) if scoped and getattr(part, name)(scope)]
            holding.setdefault(stack, set()).update(holds(nodes[path][1], name) for name in names)
    return holding


def holds(node: str, name: str) -> Factor:
    """The declaration `name` of the part at a node, where it holds."""
    return Factor(f"{node}/{name}{HOLDS}", "True", False)


@cache
def declared_by(cls: type[Part]) -> tuple[tuple[str, bool], ...]:
    """(name, whether it takes the scope) of the methods by which a kind overrides a yes-or-no declaration of its group."""
    group = cls.__mro__[cls.__mro__.index(Part) - 1]
    names = [name for name, member in vars(group).items() if isinstance(member, FunctionType)]
    answers = [(name, inspect.signature(getattr(group, name))) for name in names if getattr(cls, name) is not vars(group)[name]]
    scoped = {name: [*signature.parameters][1:] for name, signature in answers if signature.return_annotation == "bool"}
    return tuple((name, bool(given)) for name, given in scoped.items() if given in ([], ["scope"]))


def pairs_of(spec: Model) -> set[Pair]:
    """Every pair that occurs in a spec."""
    return {pair for scope in scopes(spec) for pair in meeting(scope)}


def meeting(scope: Iterable[Factor]) -> Iterator[Pair]:
    """The pairs among these factors that must be covered."""
    ordered = sorted(scope)
    kinds = [factor for factor in ordered if factor.kind]
    by_node: dict[str, list[Factor]] = {}
    for factor in ordered:
        if not factor.kind:
            by_node.setdefault(factor.node, []).append(factor)
    yield from (pair for pair in itertools.combinations(kinds, 2) if pair[0].place != pair[1].place and _near(*pair))
    declared = [factor for factor in ordered if factor.declaration]
    for factor in declared:
        beside = [kind for kind in kinds if kind.node == factor.above and f"{kind.place}={kind.value}" != factor.node]
        beside += [other for other in declared if other.above == factor.above and other.node > factor.node]
        yield from ((min(factor, other), max(factor, other)) for other in beside)
    for node, own in by_node.items():
        whole = BLOCK if node.startswith(BLOCK) else "model"
        near = [kind for kind in kinds if kind.node in (whole, node) or kind.node.startswith(f"{node}/")]
        yield from ((min(a, b), max(a, b)) for a in own for b in near)
        yield from (pair for pair in itertools.combinations(own, 2) if pair[0].place != pair[1].place)
        above = by_node.get(node.rpartition("/")[0], ())
        yield from ((min(a, b), max(a, b)) for a in own for b in above)


def _near(factor: Factor, other: Factor) -> bool:
    """Whether one of two kinds fills a slot of the block or of the model, or is in or beside the other's part."""
    inner, outer = sorted((factor.node, other.node), key=len, reverse=True)
    return not {inner, outer}.isdisjoint({BLOCK, "model"}) or f"{inner}/".startswith(f"{outer}/")


# -- covering ------------------------------------------------------------------------------------------------------------


def all_factors() -> list[Factor]:
    """Every possible factor, from the registry and the samples."""
    return sorted({*_possible("model", "model"), *_possible("block", BLOCK)})


def _possible(kind: str, node: str) -> Iterator[Factor]:
    for name, group, empty in fields(kind):
        place = f"{node}/{name}"
        if name in sampled(kind):
            yield from (Factor(place, text, False) for text in sampled(kind)[name])
        elif group is not None and not issubclass(group, (Block, Model)):
            for inside in candidates(group, kind, name, empty):
                yield Factor(place, inside, True)
                # the masks inside a joined mask come from its samples, not from every mask again
                if inside != "None":
                    yield from (holds(f"{place}={inside}", name) for name, _ in declared_by(KINDS[inside]))
                    yield from _possible(inside, f"{place}={inside}")


def pins(*wanted: Factor) -> dict[str, str]:
    """The pins (place -> value) that give a spec with these factors: their values, and the kinds above them."""
    pinned: dict[str, str] = {}
    for factor in wanted:
        pinned[factor.place] = factor.value
        pieces = factor.node.split("/")
        for i, piece in enumerate(pieces[1:], 1):
            name, _, kind = piece.partition("=")
            pinned["/".join([*pieces[:i], name])] = kind
    return pinned


def consistent(a: Factor, b: Factor) -> bool:
    """Whether one spec can have both factors: no slot needs two kinds."""
    one, other = pins(a), pins(b)
    return all(other.get(place, value) == value for place, value in one.items())


def followed_from(declaration: Factor, scope: Iterable[Factor]) -> dict[str, str]:
    """The pins that a declaration may follow from: the parts beside its own, with their fields."""
    inside = [factor for factor in scope if factor.place.startswith(f"{declaration.above}/") and not factor.declaration]
    return {factor.place: factor.value for factor in inside if factor.kind or factor.node != declaration.above}


class PairCover:
    """Samples specs with every value, then specs until every pair is covered; then it has the coverage."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.specs: dict[str, Model] = {}
        self.covered: set[Pair] = set()
        self.met: set[Factor] = set()
        self.examples: dict[Factor, dict[str, str]] = {}  # by declaration: pins that it followed from
        self.wanted: list[Pair] = []
        self.impossible_factors: list[Factor] = []
        self.impossible_pairs: list[Pair] = []

    def coverage(self) -> float:
        """The fraction of the possible pairs that occur in some spec."""
        covered = sum(pair in self.covered for pair in self.wanted)
        impossible = sum(pair not in self.covered for pair in self.impossible_pairs)  # a later sample may have covered one
        return covered / (len(self.wanted) - impossible) if self.wanted else 0.0

    def each_pair(self) -> Iterator[Model]:
        """Specs that together, with those of `each_value`, which come first, have every pair."""
        possible = [factor for factor in all_factors() if factor in self.met]
        self.wanted = sorted({pair for pair in meeting(possible) if consistent(*pair)})
        todo = list(self.wanted)
        self.rng.shuffle(todo)
        others = iter([pair for pair in todo if all(factor.in_block for factor in pair)])
        for pair in todo:
            if pair in self.covered:
                continue
            free = (self.pins(*other) for other in others if other != pair and other not in self.covered)
            tries = TRIES * (1 + 2 * any(factor.declaration for factor in pair))
            spec = self.best(self.pins(*pair), set(pair), tuple(itertools.islice(free, LAYERS - 1)), tries)
            if spec is None:
                self.impossible_pairs.append(pair)
            else:
                yield self.keep(spec)

    def each_value(self) -> Iterator[Model]:
        """Specs that together have every factor; a factor that no sample has is impossible."""
        for factor in all_factors():
            if factor in self.met:
                continue
            spec = self.best(pins(factor), {factor}, tries=RARE if factor.declaration else TRIES)
            if spec is None:
                self.impossible_factors.append(factor)
            else:
                yield self.keep(spec)

    def keep(self, spec: Model) -> Model:
        """Add a spec to the cover."""
        self.specs[spec.key] = spec
        self.covered.update(pairs_of(spec))
        for scope in scopes(spec):
            self.met.update(scope)
            for factor in scope:
                if factor.declaration and factor not in self.examples:
                    self.examples[factor] = followed_from(factor, scope)
        return spec

    def pins(self, *wanted: Factor) -> dict[str, str]:
        """The pins that give a spec with these factors; for a declaration, those that it followed from once."""
        examples = [self.examples[factor] for factor in wanted if factor in self.examples]
        return {place: value for pinned in (*examples, pins(*wanted)) for place, value in pinned.items()}

    def best(
        self, pinned: dict[str, str], wanted: set[Factor], later: tuple[dict[str, str], ...] = (), tries: int = TRIES
    ) -> Model | None:
        """Of several legal samples that have the wanted factors, the one that covers most new pairs."""
        sound: list[Model] = []
        excepted: list[Model] = []
        for i in range(tries):
            spec = attempt(self.rng, pinned, later if i < CROWDED else ())
            if spec is None or not any(wanted <= scope for scope in scopes(spec)):
                continue
            (excepted if any(part.proof.excepts(part, scope) for _, part, scope in walk(spec)) else sound).append(spec)
            if len(sound) == CANDIDATES:
                break
        # a spec with an exception tests less, so it is used only where no other has the wanted factors
        return max(sound or excepted, key=lambda spec: len(pairs_of(spec) - self.covered), default=None)


def quick_specs(seed: int = 0, count: int = 12) -> list[Model]:
    """Return `count` specs that together have as many kinds as possible."""
    rng, missing = random.Random(seed), {(f.place, f.value) for f in all_factors() if f.kind}
    chosen: list[Model] = []
    depths = [{"model/mtp": kind} for kind in sorted(KINDS) if issubclass(KINDS[kind], Mtp)]  # rarely legal by chance
    while len(chosen) < count:
        pinned = depths[len(chosen)] if len(chosen) < len(depths) else {}
        samples = [spec for _ in range(30) if (spec := attempt(rng, pinned)) is not None]
        kinds = {spec.key: {(f.place, f.value) for scope in scopes(spec) for f in scope if f.kind} for spec in samples}
        best = max(samples, key=lambda spec: len(kinds[spec.key] & missing))
        missing -= kinds[best.key]
        chosen.append(best)
    return chosen
