"""The verdict on rollouts: each cause with its share of the gap, its formula and the token that shows it most.

    δ = s − t        the sampler's log-prob minus the trainer's, per token
    mean |δ|, max |δ|
    KL(q‖p)          mean of e^d − d − 1, d = t − s (the estimator k3, Schulman 2020)
    outside          the fraction of tokens whose ratio e^(t − s) is not in [0.8, 1.2]
    multiplicative   mean of e^|δ| (`token_mult_prob_error` of NeMo-RL, which warns above 1.05)

equal        every |δ| is at most 1e-4                                                          exit code 0
rounding     the gap is that of another dtype or batch shape                                    exit code 0
sampling     temperature or truncation explain it, up to rounding                               exit code 0
stale        older weights explain it, up to rounding                                           exit code 0
structural   the log-probs are shifted, the sampler runs another model, or much is unexplained  exit code 1

Settings that the file records and the fit contradicts end with 1, too: the sampler did not do what it says.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.proof.rollouts.file import Rollout

RolloutStatus = Literal["equal", "rounding", "sampling", "stale", "structural"]
EQUAL = 1e-4  # a log-prob in a file has a few digits
RATIOS = (0.8, 1.2)
STRUCTURAL = frozenset({"shift", "structure", "unexplained"})
SAMPLING = frozenset({"temperature", "truncation"})
STALE = "staleness"


@dc.dataclass(frozen=True)
class Statistics:
    """The size of a gap, in the measures that trainers log."""

    mean: float
    mean_abs: float
    max_abs: float
    k3: float
    max_ratio: float  # the largest of e^|δ|
    outside: float
    multiplicative: float
    pearson: float | None  # of the probs of both sides; None where one is constant

    @classmethod
    def of(cls, sampler: Tensor, trainer: Tensor) -> Statistics:
        """The statistics of two log-probs (n,)."""
        gap = sampler - trainer
        ratio = (-gap).clamp(max=80.0).exp()
        probs = torch.stack([sampler.exp(), trainer.exp()])
        varies = len(gap) > 1 and bool((probs.std(1) > 0).all())
        size = gap.abs().clamp(max=80.0)
        return cls(
            mean=gap.mean().item(),
            mean_abs=gap.abs().mean().item(),
            max_abs=gap.abs().max().item(),
            k3=(ratio + gap - 1).mean().item(),
            max_ratio=size.exp().max().item(),
            outside=((ratio < RATIOS[0]) | (ratio > RATIOS[1])).double().mean().item(),
            multiplicative=size.exp().mean().item(),
            pearson=torch.corrcoef(probs)[0, 1].item() if varies else None,
        )


@dc.dataclass(frozen=True)
class ShownToken:
    """The token that shows a cause most: its line in the file, its index among the tokens behind the prompt, its id, what the
    cause adds to its log-prob, and the log-probs of both sides."""

    line: int
    index: int
    token: int
    value: float
    sampler: float
    trainer: float

    @classmethod
    def of(cls, rollout: Rollout, position: int, value: float, trainer: float) -> ShownToken:
        """The token at a position of a rollout."""
        index = position - rollout.first
        return cls(rollout.line, index, rollout.tokens[position], value, rollout.logprobs[position], trainer)


@dc.dataclass(frozen=True)
class GapCause:
    """One cause: its share Σ c·δ / Σ δ², the mean of |c|, its formula and its token."""

    name: str
    share: float
    mean_abs: float
    description: str
    formula: str
    token: ShownToken


@dc.dataclass(frozen=True)
class RolloutVerdict:
    """The causes of a gap between a sampler and a trainer, the largest share first."""

    a: str  # the trainer's model
    b: str  # the file
    dtype: str
    rollouts: int
    tokens: int
    explained: int  # tokens that the search used
    statistics: Statistics
    causes: list[GapCause]
    settings: str  # of the sampler, as fitted
    contradictions: list[str]
    tested: str
    not_tested: str
    notes: list[str]

    @property
    def cause(self) -> str | None:
        """The name of the cause with the largest share; None where there is no gap."""
        return self.causes[0].name if self.causes else None

    @property
    def status(self) -> RolloutStatus:
        """The verdict in one word."""
        if self.statistics.max_abs <= EQUAL:
            return "equal"
        names = {cause.name for cause in self.causes}
        if names & STRUCTURAL:
            return "structural"
        return "stale" if STALE in names else "sampling" if names & SAMPLING else "rounding"

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return self.status == "structural" or bool(self.contradictions)

    def data(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {
            "a": self.a,
            "b": self.b,
            "dtype": self.dtype,
            "verdict": self.status,
            "cause": self.cause,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "explained_tokens": self.explained,
            "statistics": dc.asdict(self.statistics),
            "settings": self.settings,
            "causes": [dc.asdict(cause) for cause in self.causes],
            "contradictions": self.contradictions,
            "tested": self.tested,
            "not_tested": self.not_tested,
            "notes": self.notes,
        }


def ranks(x: Tensor) -> Tensor:
    """The rank of each value (n,), ties in order."""
    return x.argsort(stable=True).argsort().double()


def spearman(x: Tensor, y: Tensor) -> float:
    """The rank correlation of two tensors (n,); 0 where one has a single value."""
    if len(x) < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return 0.0
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


def by_version(rollouts: Sequence[Rollout]) -> list[int | str]:
    """The versions of the weights, oldest first: by number, or in the order of the file."""
    found = list(dict.fromkeys(rollout.version for rollout in rollouts if rollout.version is not None))
    numbers = [version for version in found if isinstance(version, int)]
    return sorted(numbers) if len(numbers) == len(found) else found  # type: ignore[return-value]
