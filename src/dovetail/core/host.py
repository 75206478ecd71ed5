"""Values that a forward pass reads from its device. Reading waits until the device has computed them, so it is done here alone:
law 22 fails for every other place."""

from __future__ import annotations

from torch import Tensor


def read(x: Tensor) -> list[int]:
    """The integers of x (n,); zeros on the meta device, which has none."""
    return [0] * len(x) if x.device.type == "meta" else x.tolist()
