"""Rotary positions in their words: `rope_parameters`, or `rope_theta` and `rope_scaling` in files of before 2026.

`partial_rotary_factor` is the share of a head that turns. Dynamic NTK's original length is their `max_position_embeddings`;
other scalings carry it with them. Without a scaling a rotary model has no greatest length: what is written there is what the
caller says, and what is read there is only a limit of theirs.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.core.part import KINDS, Part
from dovetail.model import Model
from dovetail.port.table import Config, Settings, look

LENGTH = "max_position_embeddings"
SHARE = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
USUAL_LENGTH = 2048
MAX_LENGTH = 2**31  # the greatest that is written


@dc.dataclass(frozen=True)
class Stretch:
    """One scaling: its name there, our kind, and their fields for ours."""

    word: str
    kind: str
    fields: Mapping[str, str]
    original: str | None = None  # our field that is their model's greatest length


STRETCHES = (
    Stretch("linear", "linear_scaling", {"factor": "factor"}),
    Stretch("dynamic", "dynamic_ntk", {"factor": "factor"}, original="original"),
    Stretch(
        "yarn",
        "yarn",
        {
            "factor": "factor",
            ORIGINAL: "original",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention",
            "truncate": "truncate",
        },
    ),
    Stretch(
        "llama3",
        "llama3",
        {"factor": "factor", ORIGINAL: "original", "low_freq_factor": "low", "high_freq_factor": "high"},
    ),
    Stretch(
        "longrope",
        "longrope",
        {
            "factor": "factor",
            ORIGINAL: "original",
            "short_factor": "short",
            "long_factor": "long",
            "attention_factor": "attention",
        },
    ),
)
BY_WORD = {stretch.word: stretch for stretch in STRETCHES}


class Rotary:
    """The rope of every attention."""

    names = ("rope_parameters", "rope_theta", "rope_scaling", SHARE, LENGTH)

    def __init__(self, ours: str, *, partial: bool = False, head: str = "head") -> None:
        """`partial`: whether the family can turn a share of each head only; `head`: the mixer's field that is its size."""
        self.ours, self.partial, self.head = ours, partial, head

    def give(self, spec: Model) -> dict[str, Any]:
        base, scaling = look(spec, f"{self.ours}.base"), look(spec, f"{self.ours}.scaling")
        head = look(spec, self.ours.replace("position", self.head))
        if not isinstance(base, float) or not isinstance(head, int):
            return {}  # no rope stands there
        said: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        if self.partial:
            said[SHARE] = look(spec, f"{self.ours}.fraction")
        if scaling is None:
            return {"rope_parameters": said}
        for stretch in STRETCHES:
            if type(scaling) is KINDS[stretch.kind]:
                values = {name: getattr(scaling, ours) for name, ours in stretch.fields.items()}
                said |= {name: _spread(value, head // 2) for name, value in values.items() if value is not None}
                said["rope_type"] = stretch.word
                return {"rope_parameters": said, LENGTH: _length(scaling, stretch)}
        return {}

    def take(self, config: Config) -> Settings:
        params = _parameters(config)
        theta = params.pop("rope_theta", None)
        found: Settings = {} if theta is None else {f"{self.ours}.base": theta}
        share = params.pop(SHARE, config.get(SHARE))
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise SpecError(f"config.{SHARE}", f"{share!r} is not a number above 0 and at most 1")
        if share is not None and (self.partial or share != 1.0):
            found[f"{self.ours}.fraction"] = share
        word = params.pop("rope_type", params.pop("type", "default"))
        params.pop("type", None)  # some files hold both
        stretch = BY_WORD.get(word) if isinstance(word, str) else None
        if stretch is None and word != "default":
            raise SpecError(
                "config.rope_parameters.rope_type", f"{word!r} is not known", f"known: default, {', '.join(BY_WORD)}"
            )
        known = stretch.fields if stretch else {}
        for name in params:
            if name not in known:
                raise SpecError(f"config.rope_parameters.{name}", f"rope of type {word} has no such field")
        if stretch is None:
            return found
        data: dict[str, Any] = {known[name]: value for name, value in params.items() if value is not None}
        if stretch.original is not None or ORIGINAL in known:
            data.setdefault(stretch.original or known[ORIGINAL], config.get(LENGTH, USUAL_LENGTH))
        return {**found, f"{self.ours}.scaling": {"kind": stretch.kind, **data}}


def _parameters(config: Config) -> dict[str, Any]:
    """The rope's own fields, from either form."""
    own, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", own), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"config.{name}", f"{value!r} is not a mapping")
    theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    return {**theta, **(old or {}), **(own or {})}


def _spread(value: Any, pairs: int) -> Any:
    """A list of factors, one a pair, where a single one of ours serves them all."""
    if not isinstance(value, tuple):
        return value
    return list(value) * pairs if len(value) == 1 else list(value)


def _length(scaling: Part, stretch: Stretch) -> int:
    """The greatest length that goes with a scaling: its own for dynamic, else as much longer as the factor says."""
    values = {f.name: getattr(scaling, f.name) for f in dc.fields(scaling)}
    if stretch.original is not None:
        return values[stretch.original]
    original = values.get("original", USUAL_LENGTH)
    return max(original + 1, int(min(original * values["factor"], MAX_LENGTH)))
