"""Groups of options: one value in Python, a flag and a key each elsewhere."""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated, Literal

import pytest

from dovetail.base.errors import UsageError
from dovetail.base.option import Option, checks_options, declared
from dovetail.base.option_group import OptionGroup, accepts_groups, grouped, ungrouped
from dovetail.base.value import values_of

Kind = Literal["plain", "spiced"]


@dc.dataclass(frozen=True)
class Dough(OptionGroup):
    dough: Annotated[Kind, Option("The kind of dough.")] = "plain"
    eggs: Annotated[int, Option("Eggs.", low=0, high=12)] = 2


@dc.dataclass(frozen=True)
class Oven(OptionGroup):
    degrees: Annotated[float, Option("Its temperature.")] = 180.0


@accepts_groups
@checks_options
def bake(name: str, *, dough: Dough | Kind = Dough(eggs=3), oven: Oven = Oven(), force: bool = False) -> object:
    return name, dough, oven, force


def test_each_option_of_a_group_is_declared_with_the_default_of_the_function() -> None:
    options = declared(bake)
    assert [(name, option.default) for name, option in options.items()] == [("dough", "plain"), ("eggs", 3), ("degrees", 180.0)]
    assert values_of(options["dough"].hint) == ("plain", "spiced")


def test_a_group_is_given_whole_by_its_first_option_or_by_options() -> None:
    assert bake("a", dough=Dough("spiced")) == ("a", Dough("spiced", 2), Oven(), False)
    assert bake("a", dough="spiced") == ("a", Dough("spiced", 3), Oven(), False)
    flat = {"eggs": 1, "degrees": 200.0, "force": True}
    assert bake("a", **flat) == ("a", Dough("plain", 1), Oven(200.0), True)  # type: ignore[arg-type]
    assert bake("a", dough=Dough("spiced"), eggs=4) == ("a", Dough("spiced", 4), Oven(), False)  # type: ignore[call-arg]
    assert ungrouped(grouped(bake, flat)) == {"dough": "plain", **flat}


def test_a_value_in_place_of_a_group_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^oven: 200 is no Oven; give Oven\(degrees=…\)$"):
        bake("a", oven=200)  # type: ignore[arg-type]


def test_the_numbers_of_a_group_are_checked() -> None:
    with pytest.raises(UsageError, match=r"^eggs: 13 is not from 0 to 12$"):
        bake("a", dough=Dough(eggs=13))


def test_an_unknown_option_is_left_to_the_function() -> None:
    with pytest.raises(TypeError, match="egs"):
        bake("a", egs=1)  # type: ignore[call-arg]
