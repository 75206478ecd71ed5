"""Fields of parts: declared types and bounds."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.nn.groups import Mask
from dovetail.spec.check import check
from dovetail.spec.field import Bounds, describe, fits


@pytest.mark.parametrize(
    ("bounds", "value", "fault"),
    [
        (Bounds(above=0), 0, "0 is not above 0"),
        (Bounds(at_least=1), 0.5, "0.5 is not at least 1"),
        (Bounds(at_least=0, below=1), 1.0, "1.0 is not in [0, 1)"),
        (Bounds(above=0, at_most=1), 0.0, "0.0 is not in (0, 1]"),
        (Bounds(at_most=3), 4, "4 is not at most 3"),
        (Bounds(), 10**12, "1000000000000 is beyond the limit of 2,147,483,647"),
        (Bounds(above=0, at_most=1), 1.0, ""),
    ],
)
def test_errors_of_bounds_have_the_value_and_the_limit(bounds: Bounds, value: float, fault: str) -> None:
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


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("layers.0.mixer.position.base", {"kind": "rope", "base": 0.0}),
        ("layers.0.mixer.position.base", {"kind": "rope", "base": -1.0}),
        ("layers.0.mixer.position.scaling.factor", {"kind": "rope", "scaling": {"kind": "longrope", "factor": 0.0}}),
        ("position.base", {"kind": "sinusoidal", "base": 0.0}),
        ("init.spread", {"kind": "normal", "spread": -1.0}),
        ("init.spread", {"kind": "mup", "spread": -1.0}),
    ],
)
def test_a_number_that_gives_no_finite_model_is_refused(path: str, part: dict[str, Any]) -> None:
    spec = from_yaml("{width: 28, layers: [{mixer: {heads: 4, head: 8}}]}")
    field = "layers.*.mixer.position" if path.startswith("layers") else path.partition(".")[0]
    with pytest.raises(SpecError) as error:
        check(spec.set(field, part))
    assert error.value.path == path
