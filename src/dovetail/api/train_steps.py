"""Single steps of a run of `train`, timed: what a lab measures that compares arms at equal speed (experiments/step_time.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from dovetail.api.run_file import complete_arguments
from dovetail.api.train import train


@contextmanager
def timed_steps(arguments: Mapping[str, Any]) -> Generator[Callable[[], float]]:
    """Open a run in memory; what is returned trains for one more step, and returns its seconds per token."""
    from dovetail.api.train_job import TrainJob

    with ExitStack() as stack:
        yield TrainJob.of(complete_arguments(train, {"spec": dict(arguments), "quiet": True}), stack).timed_steps()
