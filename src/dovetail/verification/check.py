"""Verify: two sides, the same prompts, one verdict.

equal        inside the bounds of clean pairs at every tap                                        exit code 0
rounding     further apart than clean pairs, but the same function in float64                     exit code 0
structural   two different functions: the first tap at which they diverge, and the cause          exit code 1
non-finite   a weight or an activation is NaN or infinite, so nothing can be compared from there  exit code 1
"""

from __future__ import annotations

import dataclasses as dc
from math import isfinite
from typing import Any

import torch

from dovetail.verification.cause import Cause, Search, find_cause
from dovetail.verification.comparison import EXACT, Comparison, Progress, Status, Tap, compare_sides, short
from dovetail.verification.match import layer_of
from dovetail.verification.prompt import Prompt, windows
from dovetail.verification.sides import Side
from dovetail.verification.weight_differences import WeightDifference, nonfinite_weights, weight_differences


@dc.dataclass
class Verdict:
    """The result of a comparison; `comparison` holds every tap."""

    a: str
    b: str
    prompt: Prompt
    comparison: Comparison
    cause: Cause | None = None
    weights: list[WeightDifference] = dc.field(default_factory=list)  # tensors whose values differ
    nonfinite: list[str] = dc.field(default_factory=list)  # weights that hold NaN or infinity: `A: layers.0.mixer.q.weight`
    notes: list[str] = dc.field(default_factory=list)

    @property
    def status(self) -> Status:
        """The verdict in one word."""
        status = self.comparison.status
        return "non-finite" if self.nonfinite and status in ("equal", "rounding") else status

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return self.status in ("structural", "non-finite")

    @property
    def first(self) -> Tap | None:
        """The tap that decides the verdict."""
        return self.comparison.first or self.comparison.first_rounding

    @property
    def layer(self) -> str | None:
        """The layer of that tap, `embed` or `head`."""
        return None if self.first is None else "embed" if self.first.address == "layers.0.in" else layer_of(self.first.address)

    def data(self) -> dict[str, Any]:
        """The verdict as JSON data; a number that is not finite is null."""
        return {
            "a": self.a,
            "b": self.b,
            "dtypes": [short(dtype) for dtype in self.comparison.dtypes],
            "prompts": self.prompt.batch,
            "tokens": self.prompt.n,
            "verdict": self.status,
            "first": None if self.first is None else self.first.address,
            "layer": self.layer,
            "cause": None if self.cause is None else dc.asdict(self.cause),
            "weights": [finite(one._asdict()) for one in self.weights],
            "non_finite_weights": self.nonfinite,
            "taps": [{**finite(dc.asdict(tap)), "state": tap.status} for tap in self.comparison.taps],
            "not_compared": self.comparison.missing,
            "notes": self.notes,
        }


def finite(data: dict[str, Any]) -> dict[str, Any]:
    """The same data with null for every number that JSON cannot hold."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in data.items()}


def verify(
    a: Side,
    b: Side,
    prompt: Prompt,
    *,
    dtype: torch.dtype | None = None,
    why: bool = True,
    progress: Progress = lambda line: None,
) -> Verdict:
    """Compare two sides; where they are two functions, search for the cause."""
    comparison = compare_sides(a, b, prompt, dtype=dtype, progress=progress)
    verdict = Verdict(a.label, b.label, prompt, comparison)
    verdict.nonfinite = [f"{letter}: {name}" for letter, side in (("A", a), ("B", b)) for name in nonfinite_weights(side)]
    spec = a.spec or b.spec
    if spec is not None:
        beyond = [size for size in windows(spec) if size >= prompt.n]
        if beyond:
            verdict.notes.append(
                f"{prompt.n} tokens do not reach the edge of a window of {beyond[0]}: an error there would not show"
            )
    if len(comparison.taps) == 1:
        verdict.notes.append("only the outputs could be compared; --map THEIRS=OURS pairs modules by name")
    if why and verdict.status == "structural" and comparison.first is not None:
        progress("searching for the cause")
        verdict.cause = explain(a, b, prompt, comparison, comparison.first)
        if verdict.cause is None:
            verdict.weights = weight_differences(a, b)
    return verdict


def explain(a: Side, b: Side, prompt: Prompt, comparison: Comparison, first: Tap) -> Cause | None:
    """Find why two sides diverge, where one of them is a model whose spec is known."""
    for known, (side, other) in enumerate(((a, b), (b, a))):
        model = side.reference()
        if model is None:
            continue
        search = Search(model, prompt, comparison, known=known, other=other.spec)
        cause = find_cause(search, first.address, lambda other=other: dict(other.module(EXACT).state_dict()))
        if cause is not None:
            return dc.replace(cause, side="ab"[known])
    return None
