"""Fields of parts: which values a declared type and declared bounds allow. Plain data, no torch.

    heads: int = bounded(8, above=0)            eps: float = bounded(1e-5, above=0)            layers: tuple[Block, ...] = ()

A value of the wrong type, NaN and infinity are refused when a part is constructed. A number outside its bounds is refused by
`check`, which knows the path. Without `bounded`, a whole number is at least 0. No number is beyond LIMITS, and no number but 0
is nearer to 0 than SMALLEST.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.base.value import options

LIMITS: dict[type, float] = {int: 2**31 - 1, float: 1e12}  # no size or factor of a model is larger
MAX_FACTOR = 1e4  # of the residual stream: the square of a query times a key times a value stays in float32
SMALLEST = 1e-30  # float32 rounds numbers near 1e-45 to 0, and a division by one near 1e-38 overflows


@dc.dataclass(frozen=True)
class Bounds:
    """The legal range of a number; None: no bound on this side but LIMITS."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    remedy: str = ""  # what to do about a number outside

    def fault(self, value: float, declared: type | None = None) -> str:
        """What is wrong with a value, empty where it is inside; `declared` is the type of the field, if not the value's own."""
        low, high = self.above if self.at_least is None else self.at_least, self.below if self.at_most is None else self.at_most
        inside = (self.above is None or value > self.above) and (self.at_least is None or value >= self.at_least)
        inside = inside and (self.below is None or value < self.below) and (self.at_most is None or value <= self.at_most)
        if inside:
            limit = LIMITS[declared or type(value)]
            if abs(value) > limit:
                return f"{value} is beyond the limit of {limit:,.0f}"
            return "" if value == 0 or abs(value) >= SMALLEST else f"{value} is nearer to 0 than {SMALLEST:g}"
        if low is not None and high is not None:
            left, right = "(" if self.at_least is None else "[", ")" if self.at_most is None else "]"
            return f"{value} is not in {left}{low:g}, {high:g}{right}"
        if low is not None:
            return f"{value} is not {'above' if self.at_least is None else 'at least'} {low:g}"
        return f"{value} is not {'below' if self.at_most is None else 'at most'} {high:g}"


DEFAULT: dict[type, Bounds] = {int: Bounds(at_least=0), float: Bounds()}


def bounded(
    default: float | tuple[float, ...] | None,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
    widens: bool = False,
) -> Any:
    """A dataclass field for a number, an optional number or a tuple of numbers, with its legal range. `widens`: it grows in
    proportion where the model is made wider."""
    return dc.field(default=default, metadata={"bounds": Bounds(above, at_least, below, at_most, remedy), "widens": widens})


def widening(part: Any) -> list[str]:
    """The fields of a part that grow in proportion where the model is made wider."""
    return [field.name for field in dc.fields(part) if field.metadata.get("widens")]


@functools.cache
def number_type(hint: Any) -> type | None:
    """int or float where a declared type is a number, an optional number or a tuple of numbers; else None."""
    types = {item for option in options(hint) for item in (typing.get_args(option) or (option,))}
    return float if float in types else int if int in types else None


def faults(part: Any, hints: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(field, what is wrong, what to do) for every number of a part that is outside its bounds; `hints`: the declared type of
    each field."""
    for field in dc.fields(part):
        value, number = getattr(part, field.name), number_type(hints[field.name])
        if value is None or number is None:
            continue
        bounds: Bounds = field.metadata.get("bounds", DEFAULT[number])
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if fault := bounds.fault(item, number):
                yield f"{field.name}.{i}" if isinstance(value, tuple) else field.name, fault, bounds.remedy


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the declared type. A whole number fits where a float is declared."""
    exact, classes, literals, items = _accepted(hint)
    if type(value) in exact or isinstance(value, classes) or value in literals:
        return True
    return items is not None and isinstance(value, tuple) and all(fits(item, items) for item in value)


@functools.cache
def _accepted(hint: Any) -> tuple[frozenset[type], tuple[type, ...], tuple[Any, ...], Any]:
    """(exact types, classes, literal values, the type of a tuple's items) that a declared type accepts."""
    exact: set[type] = set()
    classes: list[type] = []
    literals: list[Any] = []
    items = None
    for option in options(hint):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal:
            literals += args
        elif origin is tuple:
            items = args[0]
        elif option in WORDS:
            exact |= {int, float} if option is float else {option}
        else:
            classes.append(option)
    return frozenset(exact), tuple(classes), tuple(literals), items


def finite(value: Any) -> bool:
    """Whether a value holds neither NaN nor infinity."""
    if type(value) is tuple:
        return all(map(finite, value))
    return type(value) is not float or math.isfinite(value)


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def describe(hint: Any) -> str:
    """A declared type in words: `a whole number or null`, `one of write, read`, `a list of masks`."""
    return " or ".join(WORDS.get(option) or _describe(option) for option in options(hint))


def _describe(option: Any) -> str:
    args = typing.get_args(option)
    if typing.get_origin(option) is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if typing.get_origin(option) is tuple:
        return f"a list of {_plural(args[0])}"
    return f"a part of the group {option.group}"


def _plural(item: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "strings"}.get(item) or f"{item.group}s"
