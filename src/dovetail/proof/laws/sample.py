"""Sampled specs: every slot has a random kind of its group, every field a random one of its part's `samples`.

Pinned places (place -> value) have the pinned value. A random combination of many parts is rarely legal: a field that `check`
refuses gets its default, and where that is no help its layer is sampled again.
"""

from __future__ import annotations

import dataclasses as dc
import random
import types
import typing
from collections.abc import Collection
from functools import cache
from typing import Any

from dovetail import parts as _registered  # noqa: F401  registers every kind before specs are sampled
from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.nn.groups import CrossMixer, Earlier, Embed, Head, Mask, Mixer, Mtp, Position
from dovetail.spec.check import problems
from dovetail.spec.part import KINDS, Part, field_types, from_data

FAMILIES = ("decoder", "encoder", "seq2seq", "vision")
SIZES = {"width": 28, "vocab": 62}  # all different and none a power of two, so that a transpose changes a shape
LAYERS = 3  # the wanted pair is pinned in the first, further pairs in the others
PLAIN = 0.7  # of the layers are blocks with the usual branches; of the others, their kind is drawn
SHARED = 0.1  # of the models have a last layer that uses the weights of the first; as many, one that reads its keys or values
RESAMPLED = 6  # times a layer is sampled again
DROPPED = 24  # times a refused field gets its default
UNORDERED = {"mask": "full", "position": "none", "packed": False}  # fields of cross attention, which has no order of its tokens
BLOCK = "model/layers=block"  # the place of a layer


@dc.dataclass
class Draw:
    """The state of sampling one spec."""

    rng: random.Random
    family: str
    pinned: dict[str, str]
    later: tuple[dict[str, str], ...] = ()  # pins of the layers after the first
    among: Collection[str] | None = None  # the kinds that are drawn; None: all

    def of_layer(self, i: int) -> Draw:
        """The same for one layer, with its pins."""
        return dc.replace(self, pinned=([self.pinned, *self.later, *[{}] * LAYERS])[i])

    def of_encoder(self) -> Draw:
        """The same for the encoder of a model."""
        return dc.replace(self, family="encoder", later=())

    def drawn(self, kind: str | None) -> bool:
        """Whether a slot may get this kind."""
        return kind is None or self.among is None or kind in self.among

    def choose(self, place: str, values: dict[str, Any]) -> Any:
        """The pinned value of this place, or a random one."""
        pinned = self.pinned.get(place)
        return values[pinned if pinned in values else self.rng.choice(list(values))]


# -- candidates --------------------------------------------------------------------------------------------------------


def slot(hint: Any) -> tuple[type[Part] | None, bool]:
    """(the group of the part in a field, None where it has no part; whether the field may be None), from its type."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    several = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None  # tuple[Mtp, ...] may be empty
    groups = [option for option in (*options, several) if isinstance(option, type) and issubclass(option, Part)]
    return (groups[0] if groups else None), type(None) in options or several is not None


@cache
def fields(kind: str) -> tuple[tuple[str, type[Part] | None, bool], ...]:
    """(name, the group of its part, whether it may be None) of each field of a kind."""
    hints = field_types(KINDS[kind])
    return tuple((f.name, *slot(hints[f.name])) for f in dc.fields(KINDS[kind]))


@cache
def sampled(kind: str) -> dict[str, dict[str, Any]]:
    """field -> {repr of the value: the value as plain data} for the samples of a kind."""
    cls = KINDS[kind]
    return {name: {_repr(cls, kind, name, value): value for value in values} for name, values in cls.proof.samples.items()}


def _repr(cls: type[Part], kind: str, name: str, value: Any) -> str:
    return repr(getattr(from_data({"kind": kind, name: value}, cls), name))


def candidates(group: type[Part], owner: str, name: str, empty: bool) -> dict[str, Any]:
    """The kinds that may fill a slot."""
    # sorted, so that a seed gives the same specs in any order of imports
    kinds: dict[str, Any] = {kind: kind for kind in sorted(KINDS) if issubclass(KINDS[kind], group)}
    if issubclass(group, Position):
        site = "stream" if owner == "model" else "mixer"
        kinds = {k: k for k in kinds if getattr(KINDS[k], "site", None) in (site, "any")}
    if issubclass(group, Mixer):
        kinds = {k: k for k in kinds if issubclass(KINDS[k], CrossMixer) == (name == "cross")}
    return {**kinds, "None": None} if empty and name != "cross" else kinds


# -- sampling ---------------------------------------------------------------------------------------------------------


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
    """Plain data of a random part for a slot, or None."""
    choices = {k: v for k, v in candidates(group, owner, name, empty).items() if draw.drawn(v)}
    if issubclass(group, Embed):
        choices = {k: k for k in choices if _takes_tokens(k) == (draw.family != "vision")}
    kind = draw.choose(f"{node}/{name}", choices)
    if kind is None:
        return None
    data = draw_part(draw, kind, f"{node}/{name}={kind}")
    return _for_family(data, draw) if issubclass(group, Mask) else data


@cache
def _takes_tokens(kind: str) -> bool:
    embed = KINDS[kind]()
    assert isinstance(embed, Embed)
    return embed.causal()


def _for_family(data: Any, draw: Draw) -> Any:
    """A mask for the family: in a decoder it is joined with causal, a prefix by `any`."""
    mask = from_data(data, Mask)
    if draw.family in ("encoder", "vision") or mask.order() == "causal":
        return data
    return {"any": ["causal", data]} if mask.joins == "any" else ["causal", data]


def draw_model(draw: Draw, inner: bool = False) -> dict[str, Any]:
    """Plain data of a random model of the family, three layers deep."""
    data: dict[str, Any] = dict(SIZES)
    for name, group, empty in fields("model"):
        if group is None or issubclass(group, (Block, Model, Mtp)):
            continue
        data[name] = draw_slot(draw, group, "model", name, empty, "model")
    data["dropout"] = draw.choose("model/dropout", sampled("model")["dropout"])
    if draw.family == "decoder":
        depth = draw_slot(draw, Mtp, "model", "mtp", True, "model")
        count = draw.rng.choice((1, 2))
        data["mtp"] = [] if depth is None else [depth] * (1 if from_data(depth, Mtp).recurs else count)
    cross = draw.family == "seq2seq" and not inner
    data["layers"] = [draw_block(draw.of_layer(i), cross) for i in range(LAYERS)]
    if draw.rng.random() < SHARED:
        data["layers"][-1] = {**data["layers"][0], "shares": 0}
    elif draw.rng.random() < SHARED:
        _read_earlier(draw, data["layers"])
    if inner:
        data["head"] = None
    else:
        data["embed"].pop("shared", None)
    if cross:
        data["encoder"] = draw_model(draw.of_encoder(), inner=True)
    return data


def draw_block(draw: Draw, cross: bool) -> dict[str, Any]:
    """Plain data of a random block."""
    kind = "block" if draw.rng.random() < PLAIN else draw.rng.choice([kind for kind in _blocks() if draw.drawn(kind)])
    data: dict[str, Any] = {"kind": kind}
    for name, group, empty in fields(kind):
        if group is not None and (name != "cross" or cross):
            data[name] = draw_slot(draw, group, kind, name, empty, BLOCK)
        elif name in sampled(kind):
            data[name] = draw.choose(f"{BLOCK}/{name}", sampled(kind)[name])
    if cross:
        own = {name for name, _, _ in fields(data["cross"]["kind"])}
        data["cross"] |= {name: value for name, value in UNORDERED.items() if name in own}
    return data


@cache
def _blocks() -> tuple[str, ...]:
    """The kinds of block, sorted as the kinds of a slot are."""
    return tuple(kind for kind in sorted(KINDS) if issubclass(KINDS[kind], Block))


def _read_earlier(draw: Draw, layers: list[dict[str, Any]]) -> None:
    """Let the attention of the last layer take something from that of the first, which it resembles."""
    mixer = layers[0]["mixer"]
    kinds = [kind for kind in sorted(KINDS) if issubclass(KINDS[kind], Earlier) and draw.drawn(kind)]
    if kinds and mixer is not None and mixer["kind"] == "attention":
        layers[-1]["mixer"] = {**mixer, "earlier": draw.rng.choice(kinds), "packed": False}


def attempt(
    rng: random.Random,
    pinned: dict[str, str],
    later: tuple[dict[str, str], ...] = (),
    among: Collection[str] | None = None,
) -> Model | None:
    """A random legal spec, or None where the sample stays illegal; `later` are pins of the layers after the first, and slots
    have kinds of `among` alone, where given."""
    family = rng.choice(FAMILIES)
    if any("cross" in place for own in (pinned, *later) for place in own):
        family = "seq2seq"
    elif ahead(pinned):
        family = "decoder"
    draw = Draw(rng, family, pinned, later, among)
    data = draw_model(draw)
    dropped = resampled = 0
    while dropped < DROPPED and resampled < RESAMPLED:
        try:
            spec = from_data(data, Model)
            refused = [path.split(".") for path, _ in problems(spec)]
        except SpecError as error:
            spec, refused = None, [error.path.split(".")]
        if spec is not None and not refused:
            return spec
        if gone := sum(drop_field(draw, data, path) for path in refused):
            dropped += gone
        elif resample_layer(draw, data, refused[0]):
            resampled += 1
        else:
            return None
    return None


def drop_field(draw: Draw, data: dict[str, Any], path: list[str]) -> bool:
    """Leave a refused field to its default; False where the path ends elsewhere, or where the field is pinned."""
    node, part, last = "model", data, path[-1]
    steps = iter(path[:-1])
    for name in steps:
        below = part.get(name)
        if name == "layers" and isinstance(below, list):
            index = next(steps, None)
            if index is None:
                return False
            node, part, draw = BLOCK, below[int(index)], draw.of_layer(int(index))
        elif name == "encoder" and isinstance(below, dict):
            part, draw = below, draw.of_encoder()
        elif isinstance(below, dict) and "kind" in below:
            node, part = f"{node}/{name}={below['kind']}", below
        else:
            return False
    if last not in part or last not in sampled(part.get("kind", "model")) or f"{node}/{last}" in draw.pinned:
        return False
    del part[last]
    return True


def ahead(pinned: dict[str, str]) -> bool:
    """Whether multi-token prediction is pinned: then the family is a decoder, with a head that goes with it."""
    return pinned.get("model/mtp", "None") != "None"


def resample_layer(draw: Draw, data: dict[str, Any], path: list[str]) -> bool:
    """Sample the layer of an error's path again, or the head, or leave multi-token prediction out; False for other paths."""
    cross = draw.family == "seq2seq"
    if path[0] == "encoder" and "encoder" in data:
        draw, data, path, cross = draw.of_encoder(), data["encoder"], path[1:], False
    if path == ["mtp"]:  # the head, the embedding or a mixer does not go with it
        slots: tuple[tuple[str, type[Part]], ...] = (("head", Head), ("embed", Embed))
        again = {name: draw_slot(draw, group, "model", name, False, "model") for name, group in slots}
        again["embed"].pop("shared", None)
        data |= again if ahead(draw.pinned) else {"mtp": []}
        return True
    if len(path) < 2 or path[0] != "layers":
        return False
    i = int(path[1])
    data["layers"][i] = draw_block(draw.of_layer(i), cross)
    return True
