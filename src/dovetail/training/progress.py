"""Progress of a training run on stderr: a bar with loss, tokens/s, MFU and time left, and one line per eval."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dovetail.training.metrics import StepMetrics


class Progress:
    """`with Progress() as show: show(metrics, done)`; prints nothing where `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.bar = Bar(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True, quiet=quiet),
            disable=quiet,
        )
        self.task = self.bar.add_task("", total=1.0, status="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

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
