"""How far apart two clean implementations of one model may be, by dtype and depth.

    allowed gap   = ROOM · PER_LAYER[dtype] · (1 + layers passed)         rounding adds up as layers do
    allowed exact = EXACT · (1 + layers passed)                           in float64, float32 islands widened (float64.py)

The numbers were measured on clean pairs, ours and transformers', of 11 families with random weights that make the most of
rounding: `python benchmarks/envelope.py` measures them anew and says where one is too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROOM = 4.0  # times the largest gap that was seen
PER_LAYER = {torch.float64: 1e-14, torch.float32: 3e-6, torch.float16: 1e-2, torch.bfloat16: 0.1}
EXACT = 1e-10


class Envelope(NamedTuple):
    """The largest gap of a clean pair, and of its float64 runs."""

    rounding: float
    exact: float


def envelope(dtypes: tuple[torch.dtype, torch.dtype], layers: int) -> Envelope:
    """For a tap with so many layers before it; of two dtypes the coarser counts."""
    depth = 1 + layers
    return Envelope(ROOM * depth * max(PER_LAYER[dtype] for dtype in dtypes), EXACT * depth)
