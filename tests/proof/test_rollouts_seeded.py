"""Seeded bugs in the explanation of rollouts: each breaks a law that holds without it."""

from __future__ import annotations

import dataclasses as dc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rollout_gaps import Gap, Maker, Truncation

from dovetail.proof.compare.sides import ModelSide
from dovetail.proof.rollouts import check, decomposition, explain
from dovetail.proof.rollouts.check import explain_rollouts
from dovetail.proof.rollouts.file import read_rollouts
from dovetail.proof.rollouts.logits import RIGHT, Sampled
from dovetail.proof.rollouts.sampling import RankedLogits, Settings, Tempered

MAKER = Maker(rows=4, length=20)
VALUES = {"temperature": "T = 0.7", "top_k": "top_k = 9", "top_p": "top_p = 0.8"}


def lawful(gap: Gap, place: Path) -> bool:
    """The law: the cause is named first with most of the gap and its own value, the shares add up, and the exit code is that
    of the cause."""
    file = gap.write(place / "rollouts.jsonl")
    older = [ModelSide(model, "older") for model in gap.older]
    verdict = explain_rollouts(ModelSide(gap.trainer), str(file), read_rollouts(file), older=older, why=False)
    first = verdict.causes[0]
    words = VALUES.get(gap.kind, gap.words)
    named = first.name in gap.names and words in first.description and first.share > 0.9
    adds = abs(sum(one.share for one in verdict.causes) - 1) < 1e-6
    return named and adds and verdict.failed == (gap.kind in ("shift", "rope base"))


def no_mass(self: Tempered, count: Tensor) -> Tensor:
    return torch.zeros_like(self.own)  # −log S is left out


def mass_without_renormalizing(self: Tempered, count: Tensor) -> Tensor:
    return -self.cumulative.gather(1, count[:, None] - 1)[:, 0].log()  # the sign of log S


def one_token_more(self: Tempered, settings: Settings) -> Tensor:
    return (KEPT(self, settings) + 1).clamp(max=self.logprobs.shape[1])


def times_temperature(self: RankedLogits, temperature: float) -> Tempered:
    return TEMPERED(self, 1 / temperature)


def never_shifted(self: Sampled, alignment: Any = RIGHT) -> tuple[Tensor, Tensor, Tensor]:
    return PAIRS(self, RIGHT)


def rows_alone_shifted(self: Sampled, alignment: Any = RIGHT) -> tuple[Tensor, Tensor, Tensor]:
    return PAIRS(self, dc.replace(alignment, token=0))


def all_rounding(self: decomposition.RoundingSize) -> float:
    return 10.0  # every gap is rounding


def no_older(*args: Any) -> list[Any]:
    return []


def all_twice(search: Any, one: Any) -> tuple[Tensor, list[explain.Component], Tensor]:
    gap, found, rest = COMPONENTS(search, one)
    return gap, [dc.replace(each, values=2 * each.values) for each in found], rest


KEPT, TEMPERED, PAIRS, COMPONENTS = Tempered.kept, RankedLogits.tempered, Sampled.pairs, explain.components


def temperature() -> Gap:
    return MAKER.settings("temperature", "gemma", 0, Truncation(temperature=0.7), narrow=False, recorded=False)


def top_k() -> Gap:
    return MAKER.settings("top_k", "gemma", 0, Truncation(top_k=9), narrow=False, recorded=False)


def top_p() -> Gap:
    return MAKER.settings("top_p", "gemma", 0, Truncation(top_p=0.8), narrow=False, recorded=False)


@pytest.mark.parametrize(
    ("make", "owner", "name", "bug"),
    [
        (top_k, Tempered, "log_mass", no_mass),
        (top_p, Tempered, "log_mass", mass_without_renormalizing),
        (top_p, Tempered, "kept", one_token_more),
        (temperature, RankedLogits, "tempered", times_temperature),
        (lambda: MAKER.shift("gemma", 0, "next"), Sampled, "pairs", never_shifted),
        (lambda: MAKER.shift("gemma", 0, "before"), Sampled, "pairs", rows_alone_shifted),
        (temperature, decomposition.RoundingSize, "floor", property(all_rounding)),
        (lambda: MAKER.stale("gemma", 0, 8, "older"), check, "older_sources", no_older),
        (temperature, decomposition, "components", all_twice),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_seeded_bug_breaks_the_law(
    make: Callable[[], Gap], owner: Any, name: str, bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gap = make()
    assert lawful(gap, tmp_path)
    monkeypatch.setattr(owner, name, bug)
    assert not lawful(gap, tmp_path)
