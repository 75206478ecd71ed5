"""Plan: the length of a run, its learning rate, and where it is saved. Plain data, no torch.

    lr = peak · min(1, (step + 1)/warmup) · (floor + (1 − floor)·½(1 + cos π·done))

`done` is the fraction of the run that is over: of its steps, or of its minutes.          Loshchilov & Hutter 2017 (cosine)
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Mapping
from pathlib import Path


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. `steps` or `minutes` ends it, whichever comes first."""

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 2.5e-3  # the peak
    warmup: int = 40  # steps
    floor: float = 0.05  # the last learning rate as a fraction of the peak
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # the largest gradient norm; a larger gradient is scaled down to it
    seed: int = 0
    evals: int = 10  # times per run that the held-out loss is measured and the model is saved
    out: Path | None = None  # the model directory to save to
    beside: Mapping[str, str] = dc.field(default_factory=dict)  # text files saved with the model, by name
    quiet: bool = False  # no progress on stderr

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: give steps or minutes")
        for name in ("steps", "minutes", "learning_rate", "clip", "evals"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name.replace('_', '-')}: {value} is not above 0")

    def fraction_done(self, step: int, seconds: float) -> float:
        """Return the fraction of the run that is over before a step; 1 or more ends it."""
        of_steps = 0.0 if self.steps is None else step / self.steps
        of_minutes = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return max(of_steps, of_minutes)

    def lr(self, step: int, done: float) -> float:
        """Return the learning rate of a step, counted from 0."""
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup)) * cosine
