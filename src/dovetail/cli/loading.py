"""How far a long load is, on stderr; a short one says nothing."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dovetail.cli.output import SafeConsole

if TYPE_CHECKING:
    from dovetail.port.load import Watch

PATIENCE = 1.0  # seconds before anything is shown


@contextmanager
def shown_loading(name: str) -> Iterator[Watch]:
    """Gives the function that is told how far the reading is."""
    columns = (TextColumn("reading {task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=SafeConsole(stderr=True), transient=True)
    task, begin = bar.add_task(name, total=None), time.monotonic()

    def watch(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > PATIENCE:
            bar.start()
        bar.update(task, completed=done, total=total)

    from dovetail.port.tensors import DroppedTensors

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DroppedTensors)
        try:
            yield watch
        finally:
            if bar.live.is_started:
                bar.stop()
    for warning in caught:
        print(f"dovetail: {name}: {warning.message}", file=sys.stderr)
