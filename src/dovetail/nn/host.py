"""Values that a forward pass or a training step reads from its device.

Reading waits until the device has computed them, so it is done here alone: law 22 fails for every other place. The meta device
has no values, and answers zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read(x: Tensor) -> list[int]:
    """The integers of x (n,)."""
    return [0] * len(x) if x.device.type == "meta" else x.tolist()


def read_floats(*values: Tensor) -> list[float]:
    """The numbers of a few scalars (), at once."""
    both = torch.stack([value.detach() for value in values])
    return [0.0] * len(values) if both.device.type == "meta" else both.tolist()
