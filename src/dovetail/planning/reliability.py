"""Interruptions of a long run, and what they cost. Plain arithmetic, no torch.

    M = hours per interruption of one GPU / GPUs                    mean time between interruptions
    T = √(2·C·M)                                                    the best interval between checkpoints that take C seconds
    lost = C/T + (T/2 + R)/M          goodput = 1 − lost            R: seconds from an interruption to the next step

Half an interval is trained again after an interruption, on average. Young 1974; Daly 2006. The rate is that of Llama 3 405B:
419 interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024), one per 50,700 GPU-hours.
"""

from __future__ import annotations

import dataclasses as dc
import math

HOUR, DAY = 3600.0, 86400.0
GPU_HOURS_PER_INTERRUPTION = 16384 * 54 * 24 / 419


@dc.dataclass(frozen=True)
class Reliability:
    """Checkpoints and interruptions of a run."""

    checkpoint_bytes: int
    checkpoint_seconds: float  # that training waits for one
    between_interruptions: float  # seconds
    interval: float  # seconds between checkpoints
    goodput: float  # the fraction of the time that trains, and is not trained again

    def interruptions(self, seconds: float) -> float:
        """The number of interruptions to expect in so many seconds."""
        return seconds / self.between_interruptions


def young_daly(checkpoint_seconds: float, between_interruptions: float) -> float:
    """Return the seconds between checkpoints that lose the least time."""
    return math.sqrt(2 * checkpoint_seconds * between_interruptions)


def reliability(
    checkpoint_bytes: int,
    gpus: int,
    *,
    write_bandwidth: float,
    restart_seconds: float,
    gpu_hours: float = GPU_HOURS_PER_INTERRUPTION,
) -> Reliability:
    """Return checkpoints and goodput of a run on so many GPUs, whose checkpoint is written at `write_bandwidth` bytes/s."""
    taken = max(checkpoint_bytes / write_bandwidth, 1e-3)
    between = gpu_hours * HOUR / gpus
    interval = max(young_daly(taken, between), taken)
    lost = taken / interval + (interval / 2 + restart_seconds) / between
    return Reliability(checkpoint_bytes, taken, between, interval, max(0.0, 1 - lost))
