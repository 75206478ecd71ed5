"""Progress of work on bytes, on stderr: a bar with the phase, the amount and the time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress as Bar,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class WorkProgress:
    """`with WorkProgress() as show: show("hashing", done, total)`; a phase has a bar of its own. Prints nothing if `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True, quiet=quiet),
            disable=quiet,
        )
        self.tasks = dict[str, TaskID]()

    def __enter__(self) -> WorkProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show how many bytes of a phase are done. What is done at the first call took no time."""
        if phase not in self.tasks:
            self.tasks[phase] = self.bar.add_task(phase, total=total, completed=done)
        self.bar.update(self.tasks[phase], completed=done)
