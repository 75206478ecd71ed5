"""Addresses with slices: `layers.*.mixer.pattern[head=5, query=-1]`.

    path        the address of a tap; `*` matches any characters, as in a shell
    axis=value  a number (from the end, if negative), a range `2:5`, or several numbers `1|4`; commas join several axes

The axes are those that the tap declares (`dovetail.spec.fold.taps`), and for all:

    pos     the token: the query of a pattern, the key of stored entries; of a state, the last token of a call. Negative
            positions count from the end of the prompt
    row     the row of the batch                      step   the step of generation; 0 is the prompt
    expert  of an activation per chosen expert: those choices that name the expert

An axis without a value (`[head]`) is swept by `sweep`, `ablate`, `attribute` and `attribution_patching`, and refused elsewhere.

`layers.3.resid` is the residual stream before layer 3. Names of TransformerLens and transformers are translated
(`look/names.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from dovetail.base.errors import SpecError
from dovetail.look.names import translated
from dovetail.spec.fold import check_patterns, taps
from dovetail.spec.part import Part, walk

Pick = int | slice | tuple[int, ...] | None  # one index, a range, several, or None: each in turn (of a sweep)
EVERYWHERE = ("row", "step")
TOKENS = ("pos", "query", "key")
SHORT = re.compile(r"\.resid$")
NUMBER, RANGE, SEVERAL = re.compile(r"-?\d+"), re.compile(r"(-?\d*):(-?\d*)"), re.compile(r"-?\d+(\|-?\d+)+")


class Target(NamedTuple):
    """One tap, its axes, and the slice of it that is meant."""

    address: str
    axes: tuple[str, ...]
    picks: Mapping[str, Pick]
    experts: int = 0  # of the mixture, where some are named of an activation per choice

    @property
    def key(self) -> str:
        """The address with the slice, as it is written."""
        return self.address + suffix(self.picks)

    @property
    def choices(self) -> str:
        """The address of the chosen experts, where some are named of an activation per choice; else empty."""
        return f"{_mixture(self.address)}.router.chosen" if self.experts else ""

    def given(self) -> Target:
        """The target itself; SpecError where an axis has no value."""
        if free := [axis for axis, pick in self.picks.items() if pick is None]:
            raise SpecError(self.key, f"{free[0]} has no value", f"write {free[0]}=0; only sweeps take each in turn")
        return self


def _mixture(address: str) -> str:
    """The path of the mixture whose experts an activation per choice is of."""
    return address.partition(".router.")[0].removesuffix(".experts").removesuffix(".bank")


def is_state(address: str) -> bool:
    """Whether the tap is a recurrent state after a call."""
    name = address.rpartition(".")[2]
    return name == "state" or name.endswith("_state")


def suffix(picks: Mapping[str, Pick]) -> str:
    """The slice as it is written behind an address."""
    written = (axis if pick is None else f"{axis}={_written(pick)}" for axis, pick in picks.items())
    return f"[{', '.join(written)}]" if picks else ""


def _written(pick: Pick) -> str:
    if isinstance(pick, slice):
        return f"{'' if pick.start is None else pick.start}:{'' if pick.stop is None else pick.stop}"
    return "|".join(map(str, pick)) if isinstance(pick, tuple) else str(pick)


def parse(text: str) -> tuple[str, dict[str, Pick]]:
    """Split an address into its pattern and its slice."""
    pattern, bracket, inside = text.partition("[")
    if not bracket:
        return pattern.strip(), {}
    if not inside.endswith("]") or not inside[:-1].strip():
        raise SpecError(text, "a slice is written [axis=value, …]", "for example layers.0.mixer.pattern[head=5, query=-1]")
    picks: dict[str, Pick] = {}
    for item in inside[:-1].split(","):
        axis, equals, value = (word.strip() for word in item.partition("="))
        if axis in picks:
            raise SpecError(text, f"names {axis} twice", "give each axis once")
        picks[axis] = _pick(text, axis, value) if equals else None
    return pattern.strip(), picks


def _pick(text: str, axis: str, value: str) -> Pick:
    if NUMBER.fullmatch(value):
        return int(value)
    if SEVERAL.fullmatch(value):
        return tuple(map(int, value.split("|")))
    if bounds := RANGE.fullmatch(value):
        return slice(*(int(bound) if bound else None for bound in bounds.groups()))
    raise SpecError(text, f"{axis}={value} is not an index", "give a number, a range 2:5, or several 1|4")


def addresses(spec: Part) -> list[str]:
    """Every address of a model's activations, in the order of its modules."""
    return list(taps(spec))


def resolve(spec: Part, texts: Iterable[str]) -> list[Target]:
    """The taps that the addresses match, with their slices; SpecError for one that matches none, or has no such axis."""
    return [target for targets in resolve_each(spec, texts) for target in targets]


def resolve_each(spec: Part, texts: Iterable[str]) -> Iterator[list[Target]]:
    """The taps that each address matches."""
    declared = taps(spec)
    for text in texts:
        pattern, picks = parse(text)
        targets = list[Target]()
        for address in [pattern] if pattern in declared else _matching(pattern, spec, declared):
            axes = tuple(declared[address].split())
            sliced = _checked(text, address, axes, picks)
            named = "expert" in sliced and "expert" not in axes
            targets.append(Target(address, axes, sliced, _experts(text, address, spec) if named else 0))
        yield targets


def _matching(pattern: str, spec: Part, declared: Mapping[str, str]) -> list[str]:
    pattern = SHORT.sub(".in", translated(pattern, spec))
    check_patterns([pattern], declared, "no tap of this model matches")
    return [address for address in declared if fnmatchcase(address, pattern)]


def _checked(text: str, address: str, axes: Sequence[str], picks: Mapping[str, Pick]) -> dict[str, Pick]:
    """The picks with `pos` as the axis of tokens that the tap has."""
    tokens = next((axis for axis in TOKENS if axis in axes), None)
    legal = [*axes, *EVERYWHERE, *(["expert"] if "choice" in axes and "expert" not in axes else [])]
    legal += ["pos"] if tokens is not None or is_state(address) else []
    if unknown := [axis for axis in picks if axis not in legal]:
        raise SpecError(text, f"{address} has no axis {unknown[0]!r}", f"its axes are {', '.join(dict.fromkeys(legal))}")
    if "pos" in picks and tokens not in (None, "pos") and tokens in picks:
        raise SpecError(text, f"names {tokens} twice: pos is the {tokens} of {address}", "give each axis once")
    step = picks.get("step", 0)
    bounds = (step.start, step.stop) if isinstance(step, slice) else step if isinstance(step, tuple) else (step,)
    if any(bound is not None and bound < 0 for bound in bounds):
        raise SpecError(text, "steps are not counted from the end, which is not known before", "the prompt is step 0")
    return {tokens if axis == "pos" and tokens is not None else axis: pick for axis, pick in picks.items()}


def _experts(text: str, address: str, spec: Part) -> int:
    """The number of experts that an activation per choice is of."""
    for path, _, scope in walk(spec):
        if path == f"{_mixture(address)}.router":
            return scope.size("experts")
    raise SpecError(text, f"there is no router of experts at {_mixture(address)}.router", "name a choice instead")
