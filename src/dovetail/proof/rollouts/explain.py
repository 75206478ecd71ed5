"""Explain a gap between a sampler's log-probs s and the trainer's t: which alignment, weights or architecture, temperature and
truncation give s, in order of parsimony.

    s = log q(y | z, T, K),     z the logits of a source: the trainer's model, the same in another dtype, an older checkpoint,
                                another architecture with the same weights

One step after the other changes one of them, the one that leaves least, until what is left is rounding or nothing helps. Then a
step is taken back where the others explain as much without it. What a source, an alignment and the settings add to t is exact
per token, so that

    δ = s − t = shift + source + temperature + truncation + rest,     share of c = Σ c·δ / Σ δ²

and the shares add up to 1.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from itertools import pairwise
from math import log

import torch
from torch import Tensor

from dovetail.proof.rollouts.fit import Fit, fit_settings, size
from dovetail.proof.rollouts.logits import RIGHT, SHIFTED, Alignment, Sampled
from dovetail.proof.rollouts.sampling import RAW, RankedLogits, Settings

STEPS = 4  # changes at most
HELPS = 0.95  # a change leaves at most this fraction of the gap,
EVIDENCE = 30.0  # and 2 n log(before / after) is at least this


@dc.dataclass(frozen=True, eq=False)
class LogitSource:
    """Logits (rows, vocab) of the model that may have sampled: the cause that it stands for, and a description."""

    cause: str
    description: str
    logits: Tensor


@dc.dataclass(frozen=True)
class Explanation:
    """How the sampler's log-probs came about."""

    source: LogitSource
    alignment: Alignment = RIGHT
    settings: Settings = RAW


class Search:
    """The sampled tokens with the logits of the trainer's model, and the steps of the search."""

    def __init__(self, sampled: Sampled, own: Tensor, recorded: Sequence[Settings], floor: float) -> None:
        """`own`: the stored logits of the trainer's model; `floor`: the size of a gap that is rounding."""
        self.sampled, self.recorded, self.floor = sampled, list(recorded), floor
        self.own = LogitSource("", "", own)
        self._ranked: dict[tuple[int, Alignment], RankedLogits] = {}
        self._sources: list[LogitSource] = []  # kept alive: `_ranked` is keyed by their ids

    def ranked(self, source: LogitSource, alignment: Alignment) -> RankedLogits:
        """The sorted logits of a source at the valid tokens of an alignment."""
        key = (id(source), alignment)
        if key not in self._ranked:
            if len(self._ranked) >= 4:
                self._ranked.clear()
                self._sources.clear()
            _, rows, tokens = self.sampled.pairs(alignment)
            self._ranked[key] = RankedLogits.of(source.logits[rows], tokens)
            self._sources.append(source)
        return self._ranked[key]

    def logprobs(self, alignment: Alignment) -> Tensor:
        """The sampler's log-probs of the valid tokens of an alignment."""
        return self.sampled.logprobs[self.sampled.pairs(alignment)[0]]

    def predicted(self, one: Explanation) -> Tensor:
        """The log-prob of every valid token, by an explanation."""
        ranked, chunk = self.ranked(one.source, one.alignment), max(1, 2**22 // one.source.logits.shape[1])
        parts = torch.arange(len(ranked.rank)).split(chunk)
        wide = (RankedLogits(ranked.logits[rows].double(), ranked.rank[rows]) for rows in parts)
        return torch.cat([some.tempered(one.settings.temperature).logprob(one.settings) for some in wide])

    def left(self, one: Explanation) -> float:
        """The size of the gap that an explanation leaves."""
        valid = self.sampled.pairs(one.alignment)[0]
        if int(valid.sum()) < max(2, len(self.sampled) // 4):
            return float("inf")
        return size(self.logprobs(one.alignment) - self.predicted(one))

    def helps(self, before: float, after: float) -> bool:
        """Whether a change is more than chance."""
        if after <= self.floor < before:
            return True
        evidence = 2 * len(self.sampled) * log(before / max(after, 1e-12)) if before > 0 else 0.0
        return after <= HELPS * before and evidence >= EVIDENCE

    def fit(self, one: Explanation) -> Explanation:
        """The same with the settings that fit best."""
        ranked = self.ranked(one.source, one.alignment)
        fit: Fit = fit_settings(ranked, self.logprobs(one.alignment), self.recorded, floor=self.floor)
        return dc.replace(one, settings=fit.settings)

    def moves(self, one: Explanation, sources: Sequence[LogitSource]) -> list[Explanation]:
        """Every change of one thing, the simplest first."""
        moves = [dc.replace(one, alignment=shift) for shift in SHIFTED if one.alignment == RIGHT]
        if one.source is self.own:
            moves += [dc.replace(one, source=source) for source in sources]
        return [*moves, self.fit(one)]

    def run(self, sources: Sequence[LogitSource] = (), start: Explanation | None = None) -> Explanation:
        """Search with these sources; `start` is where to begin."""
        best = start or Explanation(self.own)
        left = self.left(best)
        for _ in range(STEPS):
            if left <= self.floor:
                break
            scored = [(self.left(move), move) for move in self.moves(best, sources)]
            after, move = min(scored, key=lambda pair: max(pair[0], self.floor))
            if not self.helps(left, after):
                break
            best, left = move, after
        return self.pruned(best)

    def pruned(self, one: Explanation) -> Explanation:
        """The explanation without what it does not need."""
        left = max(self.left(one), self.floor)
        simpler = [
            dc.replace(one, settings=dc.replace(one.settings, temperature=1.0)),
            dc.replace(one, settings=Settings(temperature=one.settings.temperature)),
            dc.replace(one, source=self.own),
        ]
        for other in simpler:
            if other != one and self.left(other) <= 1.02 * left:
                return self.pruned(other)
        return one


@dc.dataclass(frozen=True)
class Component:
    """What one cause adds to the log-prob of every token (n,), valid tokens alone."""

    cause: str
    description: str
    formula: str
    values: Tensor


def components(search: Search, one: Explanation) -> tuple[Tensor, list[Component], Tensor]:
    """(δ, components, rest), each over the valid tokens of the alignment; δ is the sum of the others."""
    valid = search.sampled.pairs(one.alignment)[0]
    steps = [Explanation(search.own), Explanation(search.own, one.alignment), dc.replace(one, settings=RAW)]
    steps += [dc.replace(one, settings=Settings(temperature=one.settings.temperature)), one]
    values = [search.predicted(steps[0])[valid], *(search.predicted(step) for step in steps[1:])]
    shift, source, temperature, truncation = (after - before for before, after in pairwise(values))
    found = []
    if one.alignment != RIGHT:
        found.append(Component("shift", SHIFTED[one.alignment], _shift_formula(one.alignment), shift))
    if one.source is not search.own:
        formula = "log softmax(z′)_y − log softmax(z)_y"
        found.append(Component(one.source.cause, one.source.description, formula, source))
    if one.settings.temperature != 1:
        text = f"T = {one.settings.temperature:.4g}"
        found.append(Component("temperature", text, "log softmax(z/T)_y − log softmax(z)_y", temperature))
    if one.settings.truncates:
        found.append(Component("truncation", ", ".join(one.settings.rules()), "−log S, S = Σ_K softmax(z/T)", truncation))
    s = search.logprobs(one.alignment)
    return s - values[0], found, s - values[-1]


def _shift_formula(alignment: Alignment) -> str:
    def at(name: str, offset: int) -> str:
        return f"{name}ₜ{'₊₁' if offset > 0 else '₋₁' if offset < 0 else ''}"

    return f"log p({at('y', alignment.token)} | z{at('', alignment.row)}) − log p(yₜ | zₜ)"
