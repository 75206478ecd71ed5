"""Progress of a load on stderr; a short load prints nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dovetail.cli.output import SafeConsole, print_error

if TYPE_CHECKING:
    from dovetail.port.load import Watch

DELAY = 1.0  # seconds before the progress bar appears


@contextmanager
def shown_loading(name: str) -> Iterator[Watch]:
    """Yield a function watch(bytes read, bytes in total) that moves a progress bar; print the warnings of the load."""
    columns = (TextColumn("reading {task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=SafeConsole(stderr=True), transient=True)
    task, begin = bar.add_task(name, total=None), time.monotonic()

    def watch(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > DELAY:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total and bar.live.is_started:  # what follows the load may show progress of its own
            bar.stop()

    from dovetail.port.tensors import DroppedTensors

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DroppedTensors)
        try:
            yield watch
        finally:
            if bar.live.is_started:
                bar.stop()
    for warning in caught:
        print_error(f"{name}: {warning.message}")
