"""Progress on stderr: a bar with loss, speed and time left; and a line whenever the model was tried on held-out data."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from dovetail.training.loop import Point


class Progress:
    """`with Progress() as show: show(point, done)`; silent where `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.bar = Bar(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True, quiet=quiet),
            disable=quiet,
        )
        self.task = self.bar.add_task("", total=1.0, news="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, point: Point, done: float) -> None:
        """Show where the run stands; `done` is the share of it that is behind."""
        speed = point.tokens / max(point.seconds, 1e-9)
        self.bar.update(self.task, completed=done, news=f"step {point.step}  loss {point.loss:.3f}  {speed:,.0f} tokens/s")
        if point.validation is not None:
            loss = f"loss {point.loss:.3f}  held-out {point.validation:.3f}"
            self.bar.console.print(f"step {point.step:6d}  {loss}  {speed:,.0f} tokens/s", highlight=False)
