"""A task of lm-eval as the metric of a lab, measured when a run ends; its items give a second interval.

    metric: {lm_eval: my_task, name: acc, tasks: my-tasks, higher_is_better: true, limit: 200}

    verdict       over seeds: is an arm better, whichever seed it is trained with?     dₛ = metric of the arm − of the base
    over items    are these models better, on items like these?    dᵢ = mean over seeds of (score of the arm − of the base)

No torch: a process that trains starts in the time of `train`.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.disk.shape import data_sha256, file_sha256
from dovetail.experiments.confidence import PairedInterval, interval

ARGUMENT = "lm_eval"  # of a run: taken out before it is trained
ITEMS = "items"  # in what a run reports


@dc.dataclass(frozen=True)
class OutsideMetric:
    """A metric of a task, which is a mean over its items."""

    task: str
    name: str = "acc"
    tasks: str | None = None  # the directory of tasks of one's own; None: those of lm-eval
    higher_is_better: bool = True
    limit: int | None = None  # items

    @property
    def label(self) -> str:
        """Its name in a report."""
        return f"{self.task}.{self.name}"

    def digests(self) -> dict[str, str]:
        """The SHA-256 of the files of the directory, together."""
        if self.tasks is None:
            return {}
        root = Path(self.tasks)
        if not root.is_dir():
            raise FileError(f"metric.tasks: there is no directory {root}")
        files = {str(path.relative_to(root)): file_sha256(path) for path in sorted(root.rglob("*")) if path.is_file()}
        return {self.tasks: data_sha256(files)}


def outside_report(model: Any, metric: OutsideMetric) -> dict[str, Any]:
    """What a run reports of its task: the metric, and its value for each item."""
    from dovetail.experiments.outside import evaluate_tasks, task_scores

    report = evaluate_tasks(model, [metric.task], metric.tasks, limit=metric.limit)
    scores = {score.metric: score for score in task_scores(report)}
    score = scores.get(metric.name)
    if score is None:
        raise FileError(f"metric.name: {metric.task} has no {metric.name} per item; choose from {', '.join(scores) or 'none'}")
    if score.higher_is_better != metric.higher_is_better:
        raise FileError(f"metric.higher_is_better: the task says {str(score.higher_is_better).lower()}")
    return {metric.label: score.value, ITEMS: list(score.items)}


def over_items(arm: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], alpha: float) -> PairedInterval | None:
    """The interval over items of the reports of two arms at the same seeds; None where a run reports no items."""
    pairs = [(a.get(ITEMS), b.get(ITEMS)) for a, b in zip(arm, base, strict=True)]
    if not pairs or any(not mine or not theirs for mine, theirs in pairs):
        return None
    by_seed = [[x - y for x, y in zip(mine, theirs, strict=True)] for mine, theirs in pairs if mine and theirs]
    return interval([sum(column) / len(column) for column in zip(*by_seed, strict=True)], alpha)
