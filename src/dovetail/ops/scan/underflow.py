"""Decay factors without subnormal numbers: a factor too small to change any sum is exactly 0.

CPUs are tens of times slower on subnormal numbers, and the factors of a fast decay are full of them.
"""

from __future__ import annotations

from math import exp

import torch.nn.functional as F
from torch import Tensor

LEAST = 40.0  # e^{−40} is far below the rounding error of float64


def exp_or_zero(log: Tensor) -> Tensor:
    """e^log for log ≤ 0, and 0 below e^{−40}."""
    return zero_if_tiny(log.clamp(min=-LEAST - 1.0).exp())


def zero_if_tiny(factor: Tensor) -> Tensor:
    """The factor, 0 where it is below e^{−40}."""
    return F.threshold(factor, exp(-LEAST), 0.0)
