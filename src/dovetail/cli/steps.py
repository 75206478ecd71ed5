"""Progress of counted steps on stderr, with the time left; short work prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dovetail.cli.output import SafeConsole

DELAY = 1.0  # seconds before the progress bar appears


@contextmanager
def shown_steps(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function step(steps done, steps in all) that moves a progress bar."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=SafeConsole(stderr=True), transient=True)
    task, begin = bar.add_task(name, total=None), time.monotonic()

    def step(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > DELAY:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield step
    finally:
        if bar.live.is_started:
            bar.stop()
