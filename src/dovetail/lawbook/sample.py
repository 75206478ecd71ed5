"""Random specs: every slot filled with one of the kinds that may stand there, every field with one of its part's samples.

What is pinned, as place -> value, is taken; the rest is left to chance. A draw of many parts hardly ever suits at once, so the
layer that `check` refuses is drawn again.
"""

from __future__ import annotations

import dataclasses as dc
import random
import types
import typing
from functools import cache
from typing import Any

from dovetail import parts as _registered  # noqa: F401  every kind must be known before any is drawn
from dovetail.core.check import check
from dovetail.core.errors import SpecError
from dovetail.core.group import Embed, Mask, Mixer, Position
from dovetail.core.part import KINDS, Part, field_types, from_data
from dovetail.model import Block, Model

FAMILIES = ("decoder", "encoder", "seq2seq", "vision")
SIZES = {"width": 28, "vocab": 62}  # none a power of two, each different, so that no transpose hides
LAYERS = 3  # what is wanted is pinned in the first, further pairs in the others
REDRAWN = 6  # times a layer is drawn again
BLOCK = "model/layers=block"  # the place of a layer


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
    # sorted: the same seed gives the same specs whatever was imported first
    found: dict[str, Any] = {kind: kind for kind in sorted(KINDS) if issubclass(KINDS[kind], group)}
    if issubclass(group, Position):
        site = "stream" if owner == "model" else "mixer"
        found = {k: k for k in found if getattr(KINDS[k], "site", None) in (site, "any")}
    if issubclass(group, Mixer):
        found = {k: k for k in found if _mixer(k).reads_encoder() == (name == "cross")}
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
            for field in ("qk_norm_whole", "qk_norm_after"):  # fields that only mean something beside another
                mixer.pop(field, None)
    if cross:
        data["cross"].update({"mask": "full", "position": "none", "packed": False})
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
