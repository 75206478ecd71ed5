"""Plan: the length of a run, its learning rate, and how it is computed; the options of training that belong together. Plain
data, no torch.

    train(spec, text, schedule=ScheduleOptions("wsd", cooldown=0.1), optimizer=OptimizerOptions("muon", momentum=0.9))

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
from typing import Annotated, Any, Literal

from dovetail.base.option import BatchSize, Option, SampleTokens
from dovetail.base.option_group import OptionGroup

MEASURED = 3  # steps of a run limited by minutes after which its number of steps is set; the first is not measured
FIRST_STEP = 1e-3  # what each of them counts as, of the run
CHECKPOINT_MINUTES = 5.0  # between checkpoints
KEEP = 3  # checkpoints
ADAPTER_RATE = 10  # times the learning rate of full fine-tuning (Schulman et al. 2025)
TIMEOUT = 600.0  # seconds that a rank waits for the others
NOT_KEYS = ("quiet", "warmup_steps")  # fields that are no keys of a run file
ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
OptimizerKind = Literal["adamw", "muon"]
Precision = Literal["fp32", "bf16"]
PrecisionChoice = Literal["auto", "fp32", "bf16"]  # auto: what is faster on this machine
Recompute = Literal["none", "selective", "blocks"]


@dc.dataclass(frozen=True)
class ScheduleOptions(OptionGroup):
    """How the learning rate rises and decays (training/plan.py)."""

    schedule: Annotated[
        ScheduleKind,
        Option("How the learning rate decays: along a cosine, linearly, in the last fifth of the run (wsd), or not."),
    ] = "cosine"
    warmup: Annotated[float, Option("The fraction of the run over which the learning rate rises to its peak.")] = 0.05
    floor: Annotated[float, Option("The last learning rate as a fraction of the peak.")] = 0.05
    cooldown: Annotated[float, Option("The fraction of a run with the schedule wsd over which the learning rate decays.")] = 0.2


@dc.dataclass(frozen=True)
class OptimizerOptions(OptionGroup):
    """How gradients become steps."""

    optimizer: Annotated[OptimizerKind, Option("AdamW for all weights, or Muon for matrices and AdamW for the rest.")] = "adamw"
    betas: Annotated[tuple[float, float], Option("Decay rates of AdamW's two moments (default: 0.9 0.95).")] = (0.9, 0.95)
    momentum: Annotated[float, Option("Momentum of Muon.")] = 0.95
    weight_decay: Annotated[float, Option("Weight decay of matrices and tables.")] = 0.1
    clip: Annotated[float, Option("The largest gradient norm.")] = 1.0  # a larger gradient is scaled down to it
    ema: Annotated[float | None, Option("Save a moving average of the weights with this decay: 0.999.")] = None


@dc.dataclass(frozen=True)
class ComputeOptions(OptionGroup):
    """How a step is computed; its result is the same but for rounding."""

    precision: Annotated[
        PrecisionChoice,
        Option(
            "bf16: matmuls in bfloat16; weights, gradients and the optimizer's state stay in float32. auto: bf16 if this "
            "machine multiplies faster in it."
        ),
    ] = "fp32"
    micro_batches: Annotated[int, BatchSize("Compute a batch in N pieces, in less memory; the result is the same.")] = 1
    compile: Annotated[bool, Option("Compile each block: faster steps after a slow first one.")] = False
    recompute: Annotated[
        Recompute,
        Option(
            "Compute activations again in the backward pass, in less memory: all inside a block, or (selective) all but "
            "those of matmuls and attention."
        ),
    ] = "none"


@dc.dataclass(frozen=True)
class ParallelOptions(OptionGroup):
    """How several ranks share the work (parallel/layout.py)."""

    shards: Annotated[
        int | None,
        BatchSize(
            "On several ranks: the number of data-parallel ranks over which FSDP shards the weights, by default all; the "
            "others are replicas (HSDP; with 1, DDP)."
        ),
    ] = None
    sequence: Annotated[
        int,
        BatchSize("On several ranks: the number of ranks that each have a chunk of every row (context parallelism)."),
    ] = 1
    ring: Annotated[
        bool,
        Option("With --sequence: send keys and values around the ranks, in less memory than gathering them (ring attention)."),
    ] = False
    tensor: Annotated[
        int,
        BatchSize("On several ranks: the number of ranks that share each layer (tensor and expert parallelism)."),
    ] = 1
    pipeline: Annotated[
        int,
        BatchSize(
            "On several ranks: the number of pipeline stages, each with some of the layers; --micro-batches go through them "
            "(1F1B)."
        ),
    ] = 1
    timeout: Annotated[
        float,
        Option(
            "Seconds that a rank waits for the others before all of them end, with their stacks on stderr.",
            low=0.0,
            above=True,
        ),
    ] = TIMEOUT


@dc.dataclass(frozen=True)
class SampleOptions(OptionGroup):
    """The text that the model generates at the end of a run, and during it."""

    sample: Annotated[int, SampleTokens("Tokens to generate at the end.")] = 160
    prompt: Annotated[str, Option("The prompt of the sample at the end.")] = "The "
    sample_every: Annotated[int, Option("Also generate a sample at every N-th eval (samples.jsonl).", low=0)] = 0
    temperature: Annotated[float, Option("The temperature of the sample; 0 picks the most probable token.", low=0.0)] = 0.8


@dc.dataclass(frozen=True, kw_only=True)
class Plan(ComputeOptions, OptimizerOptions, ScheduleOptions):
    """The settings of a run. It ends after `steps`, or after about as many minutes."""

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 2.5e-3  # the peak
    warmup_steps: int | None = None  # in place of the fraction `warmup` of the run
    precision: Precision = "fp32"
    seed: int = 0
    evals: int = 10  # times per run that the held-out loss is measured
    quiet: bool = False  # no progress on stderr

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("a run needs an end: give steps or minutes")
        for name in ("warmup", "cooldown", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not from 0 to 1")
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
        return {name: value for name, value in dc.asdict(self).items() if name not in NOT_KEYS}

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
        if self.warmup_steps is not None:
            warm = (step + 1) / max(1, self.warmup_steps)
        else:
            warm = after / self.warmup if self.warmup else 1.0
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
