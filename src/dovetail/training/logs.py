"""Metrics of a run to TensorBoard and to Weights & Biases, beside loss.jsonl. Each is an extra, imported where it is used.

    OUT/tensorboard/     event files; a resumed run hides the steps that it trains again
    OUT/wandb/           the run of Weights & Biases, which a resumed run continues; WANDB_MODE=offline uploads nothing

Tags are the names of loss.jsonl; what an objective measures on held-out data is `val_NAME`.
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any, Literal, get_args

from dovetail.core.errors import UsageError, install_command
from dovetail.training.metrics import StepMetrics

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
