"""RoPE in configs: `rope_parameters`, or `rope_theta` and `rope_scaling` in files from before 2026.

`partial_rotary_factor` is the fraction of a head that is rotated; of proportional RoPE, the fraction of its pairs. The original
length of dynamic NTK is `max_position_embeddings`; other scalings hold it themselves. Without a scaling RoPE has no greatest
length: the caller's `length` is written, and what is read is only a limit of their code.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.field import Config, Field, Settings, value_at
from dovetail.model.model import Model
from dovetail.spec.part import KINDS, Part

LENGTH = "max_position_embeddings"
ROTARY_FRACTION = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
DEFAULT_LENGTH = 2048
MAX_LENGTH = 2**31  # the greatest that is written


@dc.dataclass(frozen=True)
class RopeScaling:
    """One RoPE scaling: its rope_type, our kind, and its config fields -> ours."""

    rope_type: str
    kind: str
    fields: Mapping[str, str]
    original: str | None = None  # our field with their max_position_embeddings
    unwritten: Mapping[str, Any] = dc.field(default_factory=dict)  # config fields that are left out at these values


SCALINGS = (
    RopeScaling("linear", "linear_scaling", {"factor": "factor"}),
    RopeScaling("dynamic", "dynamic_ntk", {"factor": "factor"}, original="original"),
    RopeScaling(
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
    RopeScaling(
        "llama3",
        "llama3",
        {"factor": "factor", ORIGINAL: "original", "low_freq_factor": "low", "high_freq_factor": "high"},
    ),
    RopeScaling(
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
    RopeScaling("proportional", "proportional", {ROTARY_FRACTION: "fraction", "factor": "factor"}, unwritten={"factor": 1.0}),
)
BY_ROPE_TYPE = {one.rope_type: one for one in SCALINGS}


class Rotary(Field):
    """The RoPE of every attention layer."""

    names = ("rope_parameters", "rope_theta", "rope_scaling", ROTARY_FRACTION, LENGTH)

    def __init__(self, path: str, *, partial: bool = False, head: str = "head") -> None:
        """`partial`: whether the family can rotate a fraction of each head; `head`: the mixer's field with the head size."""
        self.path, self.partial, self.head = path, partial, head

    def to_hf(self, spec: Model) -> dict[str, Any]:
        base, scaling = value_at(spec, f"{self.path}.base"), value_at(spec, f"{self.path}.scaling")
        head = value_at(spec, self.path.replace("position", self.head))
        if not isinstance(base, float) or not isinstance(head, int):
            return {}  # no RoPE at this path
        written: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        if self.partial:
            written[ROTARY_FRACTION] = value_at(spec, f"{self.path}.fraction")
        if scaling is None:
            return {"rope_parameters": written}
        for kind in SCALINGS:
            if type(scaling) is KINDS[kind.kind]:
                values = {name: getattr(scaling, ours) for name, ours in kind.fields.items()}
                values = {name: value for name, value in values.items() if value != kind.unwritten.get(name)}
                written |= {name: _repeated(value, head // 2) for name, value in values.items()}
                written["rope_type"] = kind.rope_type
                return {"rope_parameters": written, LENGTH: _length(scaling, kind)}
        return {}

    def from_hf(self, config: Config) -> Settings:
        params = _parameters(config)
        theta = params.pop("rope_theta", None)
        result: Settings = {} if theta is None else {f"{self.path}.base": theta}
        word = params.pop("rope_type", params.pop("type", "default"))
        params.pop("type", None)  # some files have both
        kind = BY_ROPE_TYPE.get(word) if isinstance(word, str) else None
        known = kind.fields if kind else {}
        fraction = params.pop(ROTARY_FRACTION, config.get(ROTARY_FRACTION))
        if fraction is not None and (
            isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1
        ):
            raise SpecError(f"config.{ROTARY_FRACTION}", f"{fraction!r} is not a number above 0 and at most 1")
        if ROTARY_FRACTION in known:
            params[ROTARY_FRACTION] = 1.0 if fraction is None else fraction
        elif fraction is not None and (self.partial or fraction != 1.0):
            result[f"{self.path}.fraction"] = fraction
        if kind is None and word != "default":
            raise SpecError(
                "config.rope_parameters.rope_type", f"{word!r} is unsupported", f"supported: default, {', '.join(BY_ROPE_TYPE)}"
            )
        for name in params:
            if name not in known:
                raise SpecError(f"config.rope_parameters.{name}", f"rope of type {word} has no such field")
        if kind is None:
            return result
        data: dict[str, Any] = {known[name]: value for name, value in params.items() if value is not None}
        if kind.original is not None or ORIGINAL in known:
            data.setdefault(kind.original or known[ORIGINAL], config.get(LENGTH, DEFAULT_LENGTH))
        return {**result, f"{self.path}.scaling": {"kind": kind.kind, **data}}


def _parameters(config: Config) -> dict[str, Any]:
    """The RoPE parameters, from either form."""
    own, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", own), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"config.{name}", f"{value!r} is not a mapping")
    theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    return {**theta, **(old or {}), **(own or {})}


def _repeated(value: Any, pairs: int) -> Any:
    """A list with one factor per rotary pair, from our single factor for all pairs."""
    if not isinstance(value, tuple):
        return value
    return list(value) * pairs if len(value) == 1 else list(value)


def _length(scaling: Part, kind: RopeScaling) -> int:
    """max_position_embeddings for a scaling: its own for dynamic NTK, else the original length times the factor."""
    values = {f.name: getattr(scaling, f.name) for f in dc.fields(scaling)}
    if kind.original is not None:
        return values[kind.original]
    original = values.get("original", DEFAULT_LENGTH)
    return max(original + 1, int(min(original * values["factor"], MAX_LENGTH)))
