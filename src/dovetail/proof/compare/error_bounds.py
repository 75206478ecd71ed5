"""The bounds inside which two clean implementations of one model stay.

In float64 the bound is fixed: EXACT · (1 + layers before the tap).

In the dtype of the sides it is estimated at each tap from the distance of each side to its own float64 run (`own`). Massive
channels and cancellation enlarge the error of both sides alike, and how much is a property of the weights; so one side may
round a few times worse than the better one, by the typical (median) token, and many times worse at its worst token, where
single roundings decide:

    median gap ≤ TYPICAL · (min(median own) + floor)          floor = eps · (1 + layers before the tap)
    max gap    ≤ WORST · (min(max own) + floor)

`python benchmarks/envelope.py` measures both ratios on clean pairs of all families and fails where a bound is too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TYPICAL, WORST = 4.0, 100.0
EXACT = 1e-10


class Envelope(NamedTuple):
    """The bounds of the median and the largest gap in the dtype of the sides, and of the largest gap in float64."""

    typical: float
    worst: float
    exact: float


def rounding_floor(dtypes: tuple[torch.dtype, torch.dtype], layers: int) -> float:
    """The rounding error that a tap may have where a side happens to be exact; the coarser of two dtypes counts."""
    return max(torch.finfo(dtype).eps for dtype in dtypes) * (1 + layers)


def envelope(
    dtypes: tuple[torch.dtype, torch.dtype], layers: int, typical: tuple[float, float], worst: tuple[float, float]
) -> Envelope:
    """The bounds of a tap with `layers` layers before it; `typical` and `worst` are the distances of both sides from their own
    float64 runs, at the median and at the worst token."""
    floor = rounding_floor(dtypes, layers)
    return Envelope(TYPICAL * (min(typical) + floor), WORST * (min(worst) + floor), EXACT * (1 + layers))
