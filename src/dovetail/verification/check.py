"""verify: two sides, the same prompts, one verdict.

equal        inside the envelope of clean pairs, tap by tap                                       exit code 0
rounding     further apart than clean pairs are, and yet the same function in float64             exit code 0
structural   two different functions: the first tap at which they part, and why                   exit code 1
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch

from dovetail.verification.cause import Cause, Scene, find
from dovetail.verification.match import layer_of
from dovetail.verification.prompt import Prompt, windows
from dovetail.verification.sides import Local
from dovetail.verification.walk import EXACT, Tap, Told, Walked, Word, walk
from dovetail.verification.weights import Apart, apart


@dc.dataclass
class Verdict:
    """What was found; `walked` holds every tap."""

    a: str
    b: str
    prompt: Prompt
    walked: Walked
    cause: Cause | None = None
    weights: list[Apart] = dc.field(default_factory=list)  # tensors that hold other numbers
    notes: list[str] = dc.field(default_factory=list)

    @property
    def word(self) -> Word:
        """The verdict in one word."""
        return self.walked.verdict

    @property
    def first(self) -> Tap | None:
        """The tap it is about."""
        return self.walked.first or self.walked.first_rounding

    @property
    def layer(self) -> str | None:
        """The layer of that tap, `embed` or `head`."""
        return None if self.first is None else "embed" if self.first.address == "layers.0.in" else layer_of(self.first.address)

    def data(self) -> dict[str, Any]:
        """For machines."""
        return {
            "a": self.a,
            "b": self.b,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.walked.dtypes],
            "prompts": self.prompt.batch,
            "tokens": self.prompt.n,
            "verdict": self.word,
            "first": None if self.first is None else self.first.address,
            "layer": self.layer,
            "cause": None if self.cause is None else dc.asdict(self.cause),
            "weights": [one._asdict() for one in self.weights],
            "taps": [{**dc.asdict(tap), "state": state(tap)} for tap in self.walked.taps],
            "not_compared": self.walked.missing,
            "notes": self.notes,
        }


def state(tap: Tap) -> Word:
    """What one tap says."""
    return "structural" if tap.structural else "rounding" if tap.rounding else "equal"


def verify(
    a: Local,
    b: Local,
    prompt: Prompt,
    *,
    dtype: torch.dtype | None = None,
    why: bool = True,
    told: Told = lambda note: None,
) -> Verdict:
    """Compare two sides, and where they are two functions look for the reason."""
    walked = walk(a, b, prompt, dtype=dtype, told=told)
    verdict = Verdict(a.label, b.label, prompt, walked)
    spec = a.spec or b.spec
    if spec is not None:
        beyond = [size for size in windows(spec) if size >= prompt.n]
        if beyond:
            verdict.notes.append(
                f"{prompt.n} tokens never reach the edge of a window of {beyond[0]}: a wrong one would not show"
            )
    if len(walked.taps) == 1:
        verdict.notes.append("only the answers could be compared; --map THEIRS=OURS names modules that belong together")
    if why and walked.first is not None:
        told("why")
        verdict.cause = explain(a, b, prompt, walked, walked.first)
        if verdict.cause is None:
            verdict.weights = apart(a, b)
    return verdict


def explain(a: Local, b: Local, prompt: Prompt, walked: Walked, first: Tap) -> Cause | None:
    """Why two sides part, where one of them is a model that we know."""
    for known, (side, other) in enumerate(((a, b), (b, a))):
        model = side.known()
        if model is None:
            continue
        scene = Scene(model, prompt, walked, known=known, other=other.spec)
        found = find(scene, first.address, lambda other=other: dict(other.made(EXACT).state_dict()))
        if found is not None:
            return dc.replace(found, side="ab"[known])
    return None
