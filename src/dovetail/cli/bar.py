"""Progress bars on stderr, that short work never shows: of a calibration, of a load."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dovetail.cli.output import SafeConsole, print_error

if TYPE_CHECKING:
    from dovetail.hf.load import Watch

DELAY = 1.0  # seconds before the progress bar appears


@contextmanager
def delayed_bar(text: str, name: str, *columns: ProgressColumn, ends: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function move(done, in all). The text of the bar may have `{task.description}`, the name. With `ends` the bar is
    gone once all is done: what follows may show progress of its own."""
    shown = (TextColumn(text, markup=False), BarColumn(), *columns, TextColumn("left"), TimeRemainingColumn())
    bar = Progress(*shown, console=SafeConsole(stderr=True), transient=True)
    task, begin = bar.add_task(name, total=None), time.monotonic()

    def move(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > DELAY:
            bar.start()
        bar.update(task, completed=done, total=total)
        if ends and done >= total and bar.live.is_started:
            bar.stop()

    try:
        yield move
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def shown_loading(name: str) -> Iterator[Watch]:
    """Yield a function watch(bytes read, bytes in total) that moves a progress bar; print the warnings of the load."""
    from dovetail.hf.tensors import DroppedTensors

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DroppedTensors)
        with delayed_bar("reading {task.description}", name, DownloadColumn(), TransferSpeedColumn(), ends=True) as watch:
            yield watch
    for warning in caught:
        print_error(f"{name}: {warning.message}")
