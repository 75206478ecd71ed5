"""Fields of parts: declared types and bounds."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from dovetail.core.field import Bounds, describe, fits
from dovetail.core.group import Mask


@pytest.mark.parametrize(
    ("bounds", "value", "fault"),
    [
        (Bounds(above=0), 0, "0 is not above 0"),
        (Bounds(at_least=1), 0.5, "0.5 is not at least 1"),
        (Bounds(at_least=0, below=1), 1.0, "1.0 is not in [0, 1)"),
        (Bounds(above=0, at_most=1), 0.0, "0.0 is not in (0, 1]"),
        (Bounds(at_most=3), 4, "4 is not at most 3"),
        (Bounds(), 10**12, "1000000000000 is beyond the limit of 2147483647"),
        (Bounds(above=0, at_most=1), 1.0, ""),
    ],
)
def test_bounds_say_what_is_wrong(bounds: Bounds, value: float, fault: str) -> None:
    assert bounds.fault(value) == fault


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (1, float, True),
        (True, int, False),
        (1.0, int, False),
        (None, int | None, True),
        ((1.0, 2), tuple[float, ...], True),
        ([1.0], tuple[float, ...], False),
        ("read", Literal["read", "write"], True),
        ("causal", Mask, False),
    ],
)
def test_types(value: Any, hint: Any, right: bool) -> None:
    assert fits(value, hint) == right


def test_types_in_words() -> None:
    assert describe(int | None) == "a whole number or null"
    assert describe(tuple[Mask, ...]) == "a list of masks"
    assert describe(Literal["a", "b"]) == "one of a, b"
