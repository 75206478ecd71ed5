"""StepMetrics: the figures of one training step, as plain data."""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Iterable, Mapping

from dovetail.core.errors import FileError
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
