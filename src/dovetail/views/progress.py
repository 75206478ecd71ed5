"""Progress on stderr: of work on bytes, of a training run, of steps that are counted or named. Nothing is shown if `quiet`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress as Bar,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dovetail.views.console import SafeConsole

if TYPE_CHECKING:
    from dovetail.training.metrics import StepMetrics

DELAY = 1.0  # seconds before a delayed bar appears
LEFT = (TextColumn("left"), TimeRemainingColumn())


class _StderrBar:
    """A bar that is there within a `with`."""

    columns: tuple[ProgressColumn, ...]

    def __init__(self, quiet: bool = False) -> None:
        columns = (*self.columns, TimeElapsedColumn(), *LEFT)
        self.bar = Bar(*columns, console=SafeConsole(stderr=True, quiet=quiet), disable=quiet)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()


class WorkProgress(_StderrBar):
    """`with WorkProgress() as show: show("hashing", done, total)`: a bar per phase, with its bytes."""

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn())

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.tasks = dict[str, TaskID]()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how many bytes of a phase are done. What is done at the first call took no time."""
        if phase not in self.tasks:
            self.tasks[phase] = self.bar.add_task(phase, total=total, completed=done)
        self.bar.update(self.tasks[phase], completed=done)


class TrainingProgress(_StderrBar):
    """`with TrainingProgress() as show: show(metrics, done)`: loss, tokens/s and MFU, and a line per eval."""

    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[status]}"))

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.task = self.bar.add_task("", total=1.0, status="")

    def __call__(self, metrics: StepMetrics, done: float) -> None:
        """Show the metrics of a step; `done` is the fraction of the run that is over."""
        speed = metrics.tokens / max(metrics.seconds, 1e-9)
        mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1%}"
        made = "".join(f"  {name} {value:.3g}" for name, value in (metrics.train_metrics or {}).items())
        status = f"step {metrics.step}  loss {metrics.loss:.3f}{made}  {speed:,.0f} tokens/s{mfu}"
        self.bar.update(self.task, completed=done, status=status)
        if metrics.val_loss is not None:
            held_out = "".join(f"  {name} {value:.4g}" for name, value in (metrics.val_metrics or {}).items())
            losses = f"loss {metrics.loss:.3f}  held-out {metrics.val_loss:.3f}{held_out}"
            self.bar.console.print(f"step {metrics.step:6d}  {losses}  {speed:,.0f} tokens/s{mfu}", highlight=False)


@contextmanager
def delayed_bar(text: str, name: str, *, counts: bool = False, ends: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function move(done, in all) of bytes, or of steps if `counts`, whose bar short work never shows. The text of the
    bar may have `{task.description}`, the name. With `ends` the bar is gone once all is done: what follows may show progress of
    its own."""
    kinds = (MofNCompleteColumn(), TimeElapsedColumn()) if counts else (DownloadColumn(), TransferSpeedColumn())
    columns = (TextColumn(text, markup=False), BarColumn(), *kinds, *LEFT)
    bar = Bar(*columns, console=SafeConsole(stderr=True), transient=True)
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
def step_bar(verb: str) -> Iterator[Callable[..., None]]:
    """Yield a function move(step) or move(done, in all, step): a spinner with the current step, and a bar for counted steps."""
    columns = (SpinnerColumn(), TextColumn(f"{verb} {{task.description}}", markup=False), BarColumn(), TimeElapsedColumn())
    # rich would print results that are meant for a pipe on the terminal of the bar
    with Bar(*columns, console=SafeConsole(file=sys.stderr), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=None)

        def move(*step: Any) -> None:
            counts = dict(zip(("completed", "total"), step[:-1], strict=False))
            bar.update(task, description=step[-1], **counts)

        yield move
