"""Plan: the length of a run, its learning rate, and where it is saved. Plain data, no torch.

    lr = peak · min(1, done/warmup) · (floor + (1 − floor)·½(1 + cos π·done))

`done` is the fraction of the run that is over: of its steps, or of its minutes.          Loshchilov & Hutter 2017 (cosine)
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Mapping
from pathlib import Path

FIRST_STEP = 1e-3  # of a run that is limited by minutes: nobody knows yet how long a step takes


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. `steps` or `minutes` ends it, whichever comes first."""

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 2.5e-3  # the peak
    warmup: int | None = None  # steps; None: `warmup_fraction` of the run
    warmup_fraction: float = 0.05
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
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup: {self.warmup_fraction} is not from 0 to 1")
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
        return self.learning_rate * min(1.0, self._warmed_up(step, done)) * cosine

    def _warmed_up(self, step: int, done: float) -> float:
        """Return the fraction of the warm-up that is over after a step. Where minutes end the run, the share of a step is
        estimated from the steps before it, and the first counts as FIRST_STEP of the run."""
        if self.warmup is not None:
            return (step + 1) / max(1, self.warmup)
        after = done * (step + 1) / step if step else FIRST_STEP
        if self.steps is not None:
            after = max((step + 1) / self.steps, after if step else 0.0)
        return after / self.warmup_fraction if self.warmup_fraction else 1.0
