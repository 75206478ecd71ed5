"""The figures of one training step: as plain data, in lines of loss.jsonl, and in TensorBoard and Weights & Biases.

    OUT/tensorboard/     event files; a resumed run hides the steps that it trains again
    OUT/wandb/           the run of Weights & Biases, which a resumed run continues; WANDB_MODE=offline uploads nothing

Their packages are extras, imported where they are used. Tags are the names of loss.jsonl; what an objective measures on
held-out data is `val_NAME`.

Model FLOPs utilization: what a step computes, against what this machine can.

    MFU = FLOPs per token · tokens/s / (peak · ranks)                                           Chowdhery et al. 2022 (PaLM)
    FLOPs per token = 3 · (matmul + attention over the pairs that masks leave)                  forward 1, backward 2

Recomputed activations do not count. The peak is measured: the fastest of several square matmuls in the dtype of the run.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dovetail.base.errors import FileError, UsageError, install_command
from dovetail.disk.shape import check_shape
from dovetail.training.plan import Precision

if TYPE_CHECKING:
    import torch

    from dovetail.model.model import Model


@dc.dataclass(frozen=True)
class StepMetrics:
    """The figures of one step; losses in nats per token."""

    step: int  # counted from 1
    loss: float  # of this step's batch
    lr: float
    tokens: int  # trained on so far
    seconds: float  # since the start of the run
    val_loss: float | None = None  # on held-out data, at evals only
    grad_norm: float | None = None  # before clipping
    val_metrics: Mapping[str, float] | None = None  # what the objective measures on held-out data beside the loss, at evals
    mfu: float | None = None  # of this step: model FLOPs utilization, against the measured peak (training/metrics.py)
    train_metrics: Mapping[str, float] | None = None  # what was measured when the batch was made: the reward of rollouts
    imbalance: float | None = None  # on several ranks: the slowest rank's own work in this step ÷ the median rank's


SHAPE = {
    "step": int,
    "loss": float,
    "lr": float,
    "tokens": int,
    "seconds": float,
    **{f"{name}?": (float, type(None)) for name in ("val_loss", "grad_norm", "mfu", "imbalance")},
    **{f"{name}?": ({str: float}, type(None)) for name in ("val_metrics", "train_metrics")},
}


def read_metrics(line: str, where: str) -> StepMetrics:
    """Read a line of `to_jsonl`; raise FileError where it is none."""
    try:
        data = json.loads(line)
        check_shape(data, SHAPE, where)
        return StepMetrics(**data)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{where}: is not the metrics of a run: {line[:60]!r}") from error


def to_jsonl(history: Iterable[StepMetrics]) -> str:
    """Return one JSON object per step and line."""
    return "".join(f"{json.dumps(dc.asdict(metrics))}\n" for metrics in history)


# -- logs -------------------------------------------------------------------------------------------------------------


LogKind = Literal["tensorboard", "wandb"]
NOT_LOGGED = ("step", "val_metrics", "train_metrics")


class MetricsLog(ABC):
    """Where the metrics of each step go."""

    @abstractmethod
    def start(self, place: Path, settings: Mapping[str, Any], steps: int) -> None:
        """Begin in a run directory, behind `steps` steps that are trained already."""

    @abstractmethod
    def record(self, metrics: StepMetrics) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left; nothing is recorded after it."""


class TensorBoardLog(MetricsLog):
    """Event files of TensorBoard."""

    def start(self, place: Path, settings: Mapping[str, Any], steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(place / "tensorboard"), purge_step=steps + 1 if steps else None)

    def record(self, metrics: StepMetrics) -> None:
        for name, value in scalars(metrics).items():
            self.writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self.writer.close()


class WandbLog(MetricsLog):
    """A run of Weights & Biases."""

    def start(self, place: Path, settings: Mapping[str, Any], steps: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

        self.run: Any = wandb.init(  # pyright: ignore[reportUnknownMemberType]
            project="dovetail", name=place.name, dir=str(place), config=dict(settings), resume="auto"
        )

    def record(self, metrics: StepMetrics) -> None:
        self.run.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self.run.finish()


LOGS: dict[LogKind, type[MetricsLog]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog}


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step by tag."""
    named = {name: value for name, value in dc.asdict(metrics).items() if name not in NOT_LOGGED and value is not None}
    return {**named, **{f"val_{name}": value for name, value in (metrics.val_metrics or {}).items()}}


def logs_of(kinds: tuple[LogKind, ...]) -> tuple[MetricsLog, ...]:
    """The logs of these kinds, each once. Raises UsageError for one whose package is missing."""
    for kind in kinds:
        if kind not in LOGS:
            raise UsageError(f"--log: {kind!r} is none of {', '.join(get_args(LogKind))}")
        found = find_module(kind)
        if found is None or found.origin is None:  # or a directory of that name, as a run has
            raise UsageError(f"--log {kind}: needs the package {kind}: {install_command(kind)}")
    return tuple(LOGS[kind]() for kind in dict.fromkeys(kinds))


SECONDS = 0.2  # of measuring
SIZES = {"cpu": 1024}  # of the matrices
TRIES = 3  # measurements of the peak after the first
LARGE = 8192  # on an accelerator


@dc.dataclass
class Speed:
    """The FLOPs of a token in training, and the FLOP/s that all ranks can do. `measure` measures the peak again."""

    flops_per_token: float
    peak: float
    measure: Callable[[], float] | None = None
    tries: int = TRIES

    def mfu(self, tokens: int, seconds: float) -> float | None:
        """The fraction of the peak at which the tokens were trained on in this time. No step is faster than the peak: where one
        is, other processes ran while the peak was measured. It is measured again; None if it is still too low."""
        rate = self.flops_per_token * tokens / max(seconds, 1e-9)
        if rate > self.peak and self.measure is not None and self.tries:
            self.tries -= 1
            self.peak = max(self.peak, self.measure())
        return rate / self.peak if rate <= self.peak else None


def speed_of(spec: Model, length: int, dtype: torch.dtype, device: torch.device, ranks: int = 1) -> Speed:
    """Measure the peak of this machine, and count the FLOPs of a token in sequences of this length."""
    from dovetail.account import account

    work = account(spec, length).flops_per_token
    forward = work["matmul"] + work["attention_causal"] + work.get("mtp", 0)

    def measure() -> float:
        peak_flops.cache_clear()
        return ranks * peak_flops(dtype, device)

    return Speed(3 * forward, ranks * peak_flops(dtype, device), measure)


@functools.cache
def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The FLOP/s of the fastest of several matmuls, measured once per process."""
    import torch

    size = SIZES.get(device.type, LARGE)
    a, b = (torch.full((size, size), 1e-3, dtype=dtype, device=device) for _ in range(2))
    _matmul_seconds(a[:64], b)  # kernels are chosen and threads started
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < SECONDS:
        best = min(best, _matmul_seconds(a, b))
    return 2 * size**3 / best


def _matmul_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    begin = time.perf_counter()
    product = a @ b
    product[0, 0].item()  # waits for the device
    return time.perf_counter() - begin


def faster_precision(device: torch.device) -> Precision:
    """bf16 where its matmuls are faster than those of float32 on this device, else fp32."""
    import torch

    return "bf16" if peak_flops(torch.bfloat16, device) > peak_flops(torch.float32, device) else "fp32"
