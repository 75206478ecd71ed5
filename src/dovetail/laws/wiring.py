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

import dataclasses as dc
import itertools
import random
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from dovetail import parts as _registered  # noqa: F401  every kind must be known before any is drawn
from dovetail.core.check import check
from dovetail.core.errors import SpecError
from dovetail.core.group import Embed, Mask, Mixer, Position
from dovetail.core.part import KINDS, Part, field_types, from_data, walk
from dovetail.model import Block, Model

FAMILIES = ("decoder", "encoder", "seq2seq", "vision")
SIZES = {"width": 28, "vocab": 62}  # none a power of two, each different, so that no transpose hides
LAYERS = 3  # what is wanted is pinned in the first, further pairs in the others
TRIES = 10
CROWDED = 5  # tries with something pinned in every layer; two pins may not go together, so the rest leave the others free
CANDIDATES = 3
REDRAWN = 6  # a draw of many parts hardly ever suits at once: the layer that does not is drawn again


BLOCK = "model/layers=block"


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


@dc.dataclass
class Draw:
    """A random spec in the making."""

    chance: random.Random
    family: str
    pinned: dict[str, str]
    later: tuple[dict[str, str], ...] = ()  # what is pinned in the layers after the first

    def of_layer(self, i: int) -> Draw:
        """The draw of one layer, with what is pinned there."""
        return dc.replace(self, pinned=([self.pinned, *self.later, *[{}] * LAYERS])[i])

    def choose(self, place: str, values: dict[str, Any]) -> Any:
        """The pinned value of this place, or any."""
        wanted = self.pinned.get(place)
        return values[wanted if wanted in values else self.chance.choice(list(values))]


# -- what there is to choose from -------------------------------------------------------------------------------------


def held(hint: Any) -> tuple[type[Part] | None, bool]:
    """(the group of parts a field holds, whether it may be empty)."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    groups = [option for option in options if isinstance(option, type) and issubclass(option, Part)]
    return (groups[0] if groups else None), type(None) in options


@cache
def fields(kind: str) -> tuple[tuple[str, type[Part] | None, bool], ...]:
    """(name, the group it holds, whether it may be empty) of each field of a kind."""
    hints = field_types(KINDS[kind])
    return tuple((f.name, *held(hints[f.name])) for f in dc.fields(KINDS[kind]))


@cache
def sampled(kind: str) -> dict[str, dict[str, Any]]:
    """field -> {value as text: value as plain data} of the samples of a kind."""
    cls = KINDS[kind]
    read = {name: {_text(cls, kind, name, value): value for value in values} for name, values in cls.samples().items()}
    return read


def _text(cls: type[Part], kind: str, name: str, value: Any) -> str:
    return repr(getattr(from_data({"kind": kind, name: value}, cls), name))


def candidates(group: type[Part], owner: str, name: str, empty: bool) -> dict[str, Any]:
    """The kinds a slot may hold; which of them make sense is the parts' own answer."""
    found: dict[str, Any] = {kind: kind for kind, cls in KINDS.items() if issubclass(cls, group)}
    if issubclass(group, Position):
        site = "stream" if owner == "model" else "mixer"
        found = {k: k for k in found if getattr(KINDS[k], "site", None) in (site, "any")}
    if issubclass(group, Mixer):
        found = {k: k for k in found if _mixer(k).reads_memory() == (name == "cross")}
    return {**found, "None": None} if empty and name != "cross" else found


def _mixer(kind: str) -> Mixer:
    made = KINDS[kind]()
    assert isinstance(made, Mixer)
    return made


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw_part(draw: Draw, kind: str, node: str) -> dict[str, Any]:
    """Plain data of a random part of this kind."""
    data: dict[str, Any] = {"kind": kind}
    for name, group, empty in fields(kind):
        place = f"{node}/{name}"
        if group is not None and name not in sampled(kind):
            data[name] = draw_slot(draw, group, kind, name, empty, node)
        elif name in sampled(kind):
            data[name] = draw.choose(place, sampled(kind)[name])
    return data


def draw_slot(draw: Draw, group: type[Part], owner: str, name: str, empty: bool, node: str) -> Any:
    """Plain data of whatever fills a slot."""
    choices = candidates(group, owner, name, empty)
    if issubclass(group, Embed):
        choices = {k: k for k in choices if _takes_tokens(k) == (draw.family != "vision")}
    kind = draw.choose(f"{node}/{name}", choices)
    if kind is None:
        return None
    data = draw_part(draw, kind, f"{node}/{name}={kind}")
    return _fitting(data, draw) if issubclass(group, Mask) else data


def _takes_tokens(kind: str) -> bool:
    made = KINDS[kind]()
    assert isinstance(made, Embed)
    return made.causal()


def _fitting(data: Any, draw: Draw) -> Any:
    """A mask as the family wants it: in a decoder joined with causal, a prefix by `any`."""
    mask = from_data(data, Mask)
    if draw.family in ("encoder", "vision") or mask.order() == "causal":
        return data
    return {"any": ["causal", data]} if mask.joins == "any" else ["causal", data]


def draw_model(draw: Draw, inner: bool = False) -> dict[str, Any]:
    """Plain data of a random model of the family, three layers deep."""
    data: dict[str, Any] = dict(SIZES)
    for name, group, empty in fields("model"):
        if group is None or issubclass(group, (Block, Model)):
            continue
        data[name] = draw_slot(draw, group, "model", name, empty, "model")
    data["dropout"] = draw.choose("model/dropout", sampled("model")["dropout"])
    cross = draw.family == "seq2seq" and not inner
    data["layers"] = [draw_block(draw.of_layer(i), cross) for i in range(LAYERS)]
    if inner:
        data["head"] = None
    else:
        data["embed"].pop("shared", None)
    if cross:
        data["encoder"] = draw_model(Draw(draw.chance, "encoder", draw.pinned), inner=True)
    return data


def draw_block(draw: Draw, cross: bool) -> dict[str, Any]:
    """Plain data of a random block."""
    data: dict[str, Any] = {}
    for name, group, empty in fields("block"):
        if group is not None and (name != "cross" or cross):
            data[name] = draw_slot(draw, group, "block", name, empty, BLOCK)
    for mixer in (data["mixer"], data.get("cross")):
        if mixer is not None and mixer.get("qk_norm", 0) is None:
            mixer.pop("qk_norm_whole", None)  # a field that only means something beside another
    if cross:
        data["cross"].update({"mask": "everything", "position": "none", "packed": False})
    return data


def attempt(chance: random.Random, pinned: dict[str, str], later: tuple[dict[str, str], ...] = ()) -> Model | None:
    """A random legal spec, or None where the draw cannot be built; `later` is pinned in the layers after the first."""
    family = chance.choice(FAMILIES)
    if any("cross" in place for own in (pinned, *later) for place in own):
        family = "seq2seq"
    draw = Draw(chance, family, pinned, later)
    data = draw_model(draw)
    for _ in range(REDRAWN):
        try:
            spec = from_data(data, Model)
            check(spec)
            return spec
        except SpecError as error:
            if not draw_layer_again(draw, data, error.path.split(".")):
                return None
    return None


def draw_layer_again(draw: Draw, data: dict[str, Any], path: list[str]) -> bool:
    """Another layer for the one in which something is wrong; False where it is elsewhere."""
    cross = draw.family == "seq2seq"
    if path[0] == "encoder" and "encoder" in data:
        draw, data, path, cross = Draw(draw.chance, "encoder", draw.pinned), data["encoder"], path[1:], False
    if len(path) < 2 or path[0] != "layers":
        return False
    i = int(path[1])
    data["layers"][i] = draw_block(draw.of_layer(i), cross)
    return True


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


class Wiring:
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
            (excepted if any(part.excepts(env) for _, part, env in walk(spec)) else sound).append(spec)
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
