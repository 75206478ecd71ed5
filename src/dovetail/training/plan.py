"""Plan: how long a run is, how fast it goes, and where to. Plain data, no torch.

    rate = peak · min(1, (step + 1)/warmup) · (floor + (1 − floor)·½(1 + cos π·done))

`done` is the share of the run that is behind: of its steps, or of its minutes.            Loshchilov & Hutter 2017 (cosine)
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Mapping
from pathlib import Path


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, how fast, and where to."""

    steps: int | None = None
    minutes: float | None = None  # whichever ends first
    learning_rate: float = 2.5e-3
    warmup: int = 40  # steps
    floor: float = 0.05  # of the peak rate, at the end
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    clip: float = 1.0  # the longest gradient
    seed: int = 0
    looks: int = 10  # how often a run is tried on held-out data and saved
    out: Path | None = None  # a model directory
    beside: Mapping[str, str] = dc.field(default_factory=dict)  # text files saved with it
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: give steps or minutes")
        for name in ("steps", "minutes", "learning_rate", "clip", "looks"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name.replace('_', '-')}: {value} is not above 0")

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is behind; 1 and more is the end."""
        shares = (
            0.0 if self.steps is None else step / self.steps,
            0.0 if self.minutes is None else seconds / (60 * self.minutes),
        )
        return max(shares)

    def rate(self, step: int, done: float) -> float:
        """The learning rate of a step."""
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup)) * cosine
