"""The figures of one training step: as plain data, in lines of loss.jsonl, and in TensorBoard and Weights & Biases.

    OUT/tensorboard/     event files; a resumed run hides the steps that it trains again
    OUT/wandb/           the run of Weights & Biases, which a resumed run continues; WANDB_MODE=offline uploads nothing

Their packages are extras, imported where they are used. Tags are the names of loss.jsonl; what an objective measures on
held-out data is `val_NAME`.
"""

from __future__ import annotations

import dataclasses as dc
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any, Literal, get_args

from dovetail.core.errors import FileError, UsageError, install_command
from dovetail.disk.shape import check_shape


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
    mfu: float | None = None  # of this step: model FLOPs utilization, against the measured peak (training/speed.py)
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
