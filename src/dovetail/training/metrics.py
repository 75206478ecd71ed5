"""StepMetrics: the figures of one training step, as plain data."""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Iterable, Mapping


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


def to_jsonl(history: Iterable[StepMetrics]) -> str:
    """Return one JSON object per step and line."""
    return "".join(f"{json.dumps(dc.asdict(metrics))}\n" for metrics in history)
