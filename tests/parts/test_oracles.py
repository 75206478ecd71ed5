"""Law 14 on every kind that comes with Dovetail; it fails where a number is wrong or an oracle is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import checks.oracles  # noqa: F401  registers the literal numbers
import dovetail.files.spec  # noqa: F401  registers every kind
from dovetail.parts.act import Act
from dovetail.parts.mask.distance import Window
from dovetail.parts.norm import LayerNormModule
from dovetail.parts.position.bias import AlibiModule
from dovetail.parts.position.rope import RopeModule
from dovetail.proof.laws.oracle import (
    ORACLES,
    Comparison,
    check_oracles,
    comparisons,
    differs,
    grouped_kinds,
    kinds_to_test,
    missing,
    oracle,
)
from dovetail.spec.part import KINDS, register


@pytest.mark.parametrize("kind", grouped_kinds())
def test_every_kind_passes_its_oracles(kind: str) -> None:
    assert [str(failure) for failure in check_oracles([kind])] == []
    assert len(list(comparisons(kind))) >= 1


def test_no_kind_is_without_an_oracle() -> None:
    assert missing() == []
    assert len(grouped_kinds()) >= 55


@pytest.mark.slow
def test_together_they_are_quick() -> None:
    check_oracles()
    began = time.process_time()
    check_oracles()
    assert time.process_time() - began < 3


def test_pairs_interleaved_everywhere_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RopeModule.turn

    def interleaved(self: Any, x: torch.Tensor, layout: Any) -> torch.Tensor:
        d = x.shape[-1] // 2
        index = torch.arange(2 * d).view(2, d).T.flatten()
        return right(self, x[..., index], layout)[..., index.argsort()]

    monkeypatch.setattr(RopeModule, "turn", interleaved)
    assert check_oracles(["rope"])


def test_a_window_that_is_one_too_wide_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Window.visible
    monkeypatch.setattr(Window, "visible", lambda self, q, k, h: right(KINDS["window"](size=self.size + 1), q, k, h))  # type: ignore[arg-type, call-arg]
    assert {"w = 4, position 9", "drawn"} <= {failure.name for failure in check_oracles(["window"])}


def test_other_seeded_bugs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AlibiModule, "score", lambda self, q, k, slope: torch.zeros(1, 2, q.n, k.n, dtype=torch.float64))
    monkeypatch.setattr(
        LayerNormModule, "forward", lambda self, x, ctx: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
    )
    assert check_oracles(["alibi"])
    assert check_oracles(["layernorm"])


@pytest.fixture
def doubled() -> Iterator[str]:
    """A kind of another package."""

    @register("doubled")
    class Doubled(Act):
        @staticmethod
        def function(x: torch.Tensor, /) -> torch.Tensor:
            return 2 * x

    yield Doubled.kind
    del KINDS["doubled"]
    ORACLES.pop("doubled", None)


def test_a_kind_of_another_package_is_tested_and_ours_only_with_oracles(doubled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a wheel, which holds no literal numbers of ours."""
    monkeypatch.setattr("dovetail.proof.laws.oracle.ORACLES", {"rope": ORACLES["rope"]})
    assert set(kinds_to_test()) == {"rope", doubled}
    assert [failure.kind for failure in check_oracles()] == [doubled]


def test_a_package_registers_its_own_oracles(doubled: str) -> None:
    assert missing() == [doubled]
    assert "has no oracle" in str(check_oracles([doubled])[0])

    @oracle(doubled)
    def twice() -> Iterator[Comparison]:
        yield Comparison("twice three", KINDS[doubled].function(torch.tensor([3.0])), [6.0])  # type: ignore[attr-defined]

    assert missing() == []
    assert check_oracles([doubled]) == []


def test_an_oracle_that_compares_nothing_or_breaks_fails(doubled: str) -> None:
    oracle(doubled)(list)
    assert "compares nothing" in str(check_oracles([doubled])[0])

    @oracle(doubled)
    def broken() -> Iterator[Comparison]:
        yield Comparison("fine", 1, 1)
        raise ZeroDivisionError("by hand")

    assert any("by hand" in str(failure) for failure in check_oracles([doubled]))


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (torch.tensor([1.0, 2.0]), [1.0, 2.0], True),
        (torch.tensor([1.0, 2.1]), [1.0, 2.0], False),
        (torch.tensor([[1.0, 2.0]]), [1.0, 2.0], False),
        (torch.tensor([float("nan"), 2.0]), [1.0, 2.0], False),
        (float("inf"), 1.0, False),
        ("word", "word", True),
        ("word", "other", False),
        ([], [], True),
        ([None, "a"], [None, "b"], False),
        ((3, 4), [3, 4], True),
        (True, 1, True),
        (0, 0, True),
        (1e-9, 0, False),
    ],
)
def test_comparisons_are_strict(got: Any, expected: Any, same: bool) -> None:
    assert (differs(Comparison("", got, expected)) == "") is same
