"""What is left of a memory, from the logarithm of it; so little that no sum would show it counts as nothing.

Processors are tens of times slower with numbers near the smallest they can hold, and a memory that fades fast is full of them.
"""

from __future__ import annotations

from math import exp

import torch.nn.functional as F
from torch import Tensor

LEAST = 40.0  # e^{−40} of anything is far below the last digit of a float64 beside it


def faded(log: Tensor) -> Tensor:
    """e^log, log ≤ 0."""
    return unless_tiny(log.clamp(min=-LEAST - 1.0).exp())


def unless_tiny(share: Tensor) -> Tensor:
    """A share that is left, 0 where it is below e^{−40}."""
    return F.threshold(share, exp(-LEAST), 0.0)
