"""Plan: the length of a run, its learning rate, and how it is computed. Plain data, no torch.

    lr = peak · min(1, t/warmup) · decay(t)                              t: the fraction of the run's tokens trained on

    cosine     floor + (1 − floor)·½(1 + cos π·t)                                       Loshchilov & Hutter 2017
    linear     1 − (1 − floor)·t
    wsd        1, and over the last `cooldown` of the run linearly down to floor         Hu et al. 2024: warm-up, stable, decay
    constant   1

The learning rate depends on tokens alone, so that a run that is stopped and resumed, or runs on a slower machine, is the same
run. A run that is limited by minutes measures its first steps, and sets its number of steps by them.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

MEASURED = 3  # steps of a run limited by minutes after which its number of steps is set; the first is not measured
FIRST_STEP = 1e-3  # what each of them counts as, of the run
CHECKPOINT_MINUTES = 5.0  # between checkpoints
KEEP = 3  # checkpoints
TIMEOUT = 600.0  # seconds that a rank waits for the others
NOT_KEYS = ("quiet", "warmup_fraction")  # fields that are no keys of a run file
ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
OptimizerKind = Literal["adamw", "muon"]
Precision = Literal["fp32", "bf16"]
PrecisionChoice = Literal["auto", "fp32", "bf16"]  # auto: what is faster on this machine
Recompute = Literal["none", "selective", "blocks"]


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. It ends after `steps`, or after about as many minutes."""

    steps: int | None = None
    minutes: float | None = None
    schedule: ScheduleKind = "cosine"
    learning_rate: float = 2.5e-3  # the peak
    warmup: int | None = None  # steps; None: `warmup_fraction` of the run
    warmup_fraction: float = 0.05
    floor: float = 0.05  # the last learning rate as a fraction of the peak
    cooldown: float = 0.2  # wsd: the fraction of the run over which the learning rate decays
    optimizer: OptimizerKind = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    momentum: float = 0.95  # of Muon
    weight_decay: float = 0.1
    clip: float = 1.0  # the largest gradient norm; a larger gradient is scaled down to it
    ema: float | None = None  # decay of the exponential moving average of weights, which is then evaluated and saved
    micro_batches: int = 1  # pieces of a batch, one forward and backward pass each; their gradients are added
    precision: Precision = "fp32"  # bf16: matmuls in bfloat16; weights, gradients and the optimizer's state stay in float32
    compile: bool = False  # compile each block
    recompute: Recompute = "none"  # which activations are computed again in the backward pass (training/recompute.py)
    seed: int = 0
    evals: int = 10  # times per run that the held-out loss is measured
    quiet: bool = False  # no progress on stderr

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: give steps or minutes")
        for name, value in {"warmup": self.warmup_fraction, "cooldown": self.cooldown, "floor": self.floor}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: {value} is not from 0 to 1")
        for name, value in {"ema": self.ema or 0.0, "momentum": self.momentum}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name}: {value} is not from 0 to below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} are not two numbers from 0 to below 1")
        for name in ("steps", "minutes", "learning_rate", "clip", "evals", "micro_batches"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name.replace('_', '-')}: {value} is not above 0")

    def settings(self) -> dict[str, Any]:
        """The fields that decide what a run computes, as plain data under the names of their flags."""
        renamed = {"warmup": self.warmup_fraction}  # a run's warm-up is always a fraction of it
        return {**{name: value for name, value in dc.asdict(self).items() if name not in NOT_KEYS}, **renamed}

    def is_measured(self, step: int, first: int = 0) -> bool:
        """Whether this is the step after which a run limited by minutes, in a process that began at step `first`, sets its
        number of steps."""
        return self.minutes is not None and step == first + MEASURED

    def measured(self, step: int, seconds: float) -> int:
        """The number of steps of a run limited by minutes, MEASURED steps of which have taken these seconds, without the
        first."""
        allowed = step + int(60 * (self.minutes or 0.0) * (MEASURED - 1) / max(seconds, 1e-9))
        return min(allowed, self.steps or allowed)

    def shortened(self, step: int, seconds: float, per_step: float) -> int | None:
        """The number of steps of a measured run, after `step` of which these seconds are left, at the pace of the last ones.
        Only a slower machine changes it: the learning rate never rises again."""
        assert self.steps is not None, "the run is measured"
        allowed = step + max(0, int(seconds / max(per_step, 1e-9)))
        return allowed if allowed < self.steps else None

    def done(self, steps: int) -> float:
        """The fraction of the run that is over after some steps; 1 ends it."""
        if self.minutes is not None:  # not measured yet
            return max(steps * FIRST_STEP, 0.0 if self.steps is None else steps / self.steps)
        assert self.steps is not None, "a plan has an end"
        return min(1.0, steps / self.steps)

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        after = self.done(step + 1)
        if self.warmup is not None:
            warm = (step + 1) / max(1, self.warmup)
        else:
            warm = after / self.warmup_fraction if self.warmup_fraction else 1.0
        return self.learning_rate * min(1.0, warm) * DECAYS[self.schedule](self, self.done(step))


def _cosine(plan: Plan, t: float) -> float:
    return plan.floor + (1 - plan.floor) * 0.5 * (1 + math.cos(math.pi * t))


def _linear(plan: Plan, t: float) -> float:
    return 1 - (1 - plan.floor) * t


def _wsd(plan: Plan, t: float) -> float:
    if plan.cooldown == 0:
        return 1.0
    return 1 - (1 - plan.floor) * max(0.0, 1 - (1 - t) / plan.cooldown)


def _constant(plan: Plan, t: float) -> float:
    return 1.0


DECAYS: Mapping[ScheduleKind, Callable[[Plan, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "constant": _constant,
}
