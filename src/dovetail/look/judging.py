"""Which scores make a trait: thresholds, and the comparison with a null distribution.

    relation   rate = (1 + |{draws: max over heads ≥ score}|) / (1 + draws)                   per model
    state      rate = (1 + |{(text, site): score ≥ threshold}|) / (1 + texts · sites)         of the sites without the trait

The thresholds are effect sizes: in a long text a small preference is significant, and yet no trait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

THRESHOLDS = MappingProxyType(
    {
        "previous-token": 0.4,
        "next-token": 0.4,
        "first-token": 0.3,  # Gu et al. 2025
        "last-token": 0.3,
        "duplicate-token": 0.3,
        "induction": 0.3,
        "positional": 0.5,
        "copying": 0.6,
        "uniform": 0.98,
        "low-entropy": 0.9,
        "entropy-collapse": 0.9,
        "massive-activation": 100.0,
        "outlier-channel": 6.0,  # Dettmers et al. 2022
        "rank-collapse": 0.99,  # the tokens differ by a tenth of their norm
        "dead-neurons": 0.0,
        "dead-experts": 0.0,
    }
)
SPANS = 0.3  # threshold of a relation that the user names
RATE = 0.01  # the largest false-alarm rate
Site = tuple[str, int]  # address, index of the head, channel or unit


class Hit(NamedTuple):
    """A site that has a trait."""

    site: Site
    score: float
    null: float
    rate: float


Parts = list[tuple[Tensor, Tensor]]  # per address: scores, and those of the null distribution
Judge = Callable[[str, Sequence[Site], Parts], Iterator[Hit]]


def related(name: str, sites: Sequence[Site], parts: Parts) -> Iterator[Hit]:
    """Yield the heads whose score is large, and larger than the largest of all heads in shuffled relations."""
    scores, nulls = (torch.cat([part[i] for part in parts], -1) for i in (0, 1))
    largest = nulls.amax(-1)
    for site, score in zip(sites, scores.tolist(), strict=True):
        rate = (1 + int((largest >= score).sum())) / (1 + len(largest))
        if score >= THRESHOLDS.get(name, SPANS) and rate <= max(RATE, 1 / (1 + len(largest))):
            yield Hit(site, score, float(largest.quantile(0.99)), rate)


def stated(name: str, sites: Sequence[Site], parts: Parts) -> Iterator[Hit]:
    """Yield the sites whose score is large in the text and in shuffled texts; parts are (rows, sites of an address)."""
    text, null = (torch.cat([part[i] for part in parts], -1).double() for i in (0, 1))
    has = null.mean(0) >= (threshold := THRESHOLDS[name])
    others = null[:, ~has].flatten()
    rate = (1 + int((others >= threshold).sum())) / (1 + others.numel()) if others.numel() else math.nan
    high = float(others.sort().values[int(0.99 * (others.numel() - 1))]) if others.numel() else math.nan
    for i in ((text.mean(0) >= threshold) & has).nonzero()[:, 0].tolist():
        yield Hit(sites[i], float(text[:, i].mean()), high, rate)
