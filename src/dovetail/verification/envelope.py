"""The bounds inside which two clean implementations of one model stay, by dtype and depth.

    allowed gap   = ROOM · PER_LAYER[dtype] · (1 + layers before the tap)      rounding errors add up over layers
    allowed exact = EXACT · (1 + layers before the tap)                        in float64 throughout (float64.py)

The numbers were measured on clean pairs, ours and transformers', of 11 families with random weights that amplify rounding:
`python benchmarks/envelope.py` measures them again and fails where one is too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROOM = 4.0  # times the largest measured gap
PER_LAYER = {torch.float64: 1e-14, torch.float32: 3e-6, torch.float16: 1e-2, torch.bfloat16: 0.1}
EXACT = 1e-10


class Envelope(NamedTuple):
    """The bounds of the gap in the dtype of the sides, and of the gap in float64."""

    rounding: float
    exact: float


def envelope(dtypes: tuple[torch.dtype, torch.dtype], layers: int) -> Envelope:
    """The bounds of a tap with `layers` layers before it; the coarser of two dtypes counts."""
    depth = 1 + layers
    return Envelope(ROOM * depth * max(PER_LAYER[dtype] for dtype in dtypes), EXACT * depth)
