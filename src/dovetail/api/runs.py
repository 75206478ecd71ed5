"""List training runs, compare them and draw their losses over each other.

Directories are searched for runs up to four levels deep. Up to eight runs are compared with the first: what differs in spec and
settings; whether their batches, tokens and the initial weights that both have are equal.

    dovetail runs
    dovetail runs rope alibi --plot loss.png
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group, RenderableType

from dovetail.api.options import OutFile
from dovetail.api.result import Result
from dovetail.core.errors import DovetailError, FileError
from dovetail.core.fold import parameters
from dovetail.core.option import Option
from dovetail.core.units import count
from dovetail.disk.atomic import check_free
from dovetail.views.console import plain_table, unwrapped
from dovetail.views.curve import draw_runs, smoothed
from dovetail.views.plot import draw_terminal

if TYPE_CHECKING:
    from dovetail.api.compare_runs import Comparison
    from dovetail.training.record import RunRecord

MOST = 8  # runs that are compared with the first, and drawn
NUMBERS = ("parameters", "tokens", "loss", "held-out", "bits/byte")
LETTERS = "abcdefgh"


@dc.dataclass(frozen=True, repr=False)
class RunList(Result):
    """Runs, and the comparison of the first with each of the others where there are at most MOST."""

    records: tuple[RunRecord, ...]
    unreadable: tuple[str, ...]  # errors of run directories that cannot be read
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [_summary(record) for record in self.records],
            "unreadable": list(self.unreadable),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }

    def view(self, width: int) -> RenderableType:
        if not self.records:
            return unwrapped("\n".join(["no runs here", *self.unreadable]))
        drawn = len(self.records) <= MOST
        table = plain_table("", "run", "layers", *NUMBERS, "state", right=NUMBERS, header=True)
        for i, record in enumerate(self.records):
            data = _summary(record)
            numbers = ["–" if data[key] is None else f"{data[key]:.3f}" for key in ("loss", "held_out_loss", "bits_per_byte")]
            row = (str(record.place), str(len(record.spec.layers)), count(data["parameters"]), f"{data['tokens']:,}", *numbers)
            table.add_row(LETTERS[i] if drawn else "", *row, record.state)
        parts: list[RenderableType] = [table, *map(unwrapped, self.unreadable)]
        if drawn and any(len(record.history) > 1 for record in self.records):
            curves = {LETTERS[i]: _curve(record) for i, record in enumerate(self.records)}
            parts += [unwrapped(""), draw_terminal(curves, min(width, 100), unit=" tokens")]
        for comparison in self.comparisons:
            parts.append(unwrapped("\n".join(["", f"{comparison.a} → {comparison.b}", *comparison.lines()])))
        return Group(*parts)


def runs(
    *directories: Annotated[
        str | Path, Option("Runs, or directories that hold runs (default: the working directory).", form="DIR", argument=True)
    ],
    plot: Annotated[str | Path | None, OutFile("Also draw the losses to a .png, .svg or .pdf file.")] = None,
    force: Annotated[bool, Option("Replace an existing file.")] = False,
) -> RunList:
    """Return the training runs in the directories (default: the working directory) and below them, up to four levels deep.

    Up to eight runs are compared with the first: what differs in spec and settings; whether their batches, tokens and the
    initial weights that both have are equal. `plot` writes their losses over each other to a .png, .svg or .pdf file;
    an existing one is replaced if `force`.
    """
    from dovetail.api.compare_runs import compare_runs
    from dovetail.training.record import find_runs, read_record

    records: list[RunRecord] = []
    problems: list[str] = []
    for place in find_runs([Path(directory) for directory in directories or (".",)]):
        try:
            records.append(read_record(place))
        except DovetailError as error:
            problems.append(str(error))
    if plot is not None:
        check_free(plot, force)
        draw_runs(_drawn(records), plot)
    compared = records[1:] if len(records) <= MOST else []
    return RunList(tuple(records), tuple(problems), tuple(compare_runs(records[0], other) for other in compared))


def _drawn(records: list[RunRecord]) -> dict[str, Any]:
    found = {str(record.place): record.history for record in records if record.history}
    if not found or len(found) > MOST:
        raise FileError(f"{len(found)} runs have losses to plot; name from 1 to {MOST} runs")
    return found


def _curve(record: RunRecord) -> list[tuple[float, float]]:
    losses = smoothed([metrics.loss for metrics in record.history], len(record.history) // 50)
    return [(float(metrics.tokens), loss) for metrics, loss in zip(record.history, losses, strict=True)]


def _summary(record: RunRecord) -> dict[str, Any]:
    last = record.history[-1] if record.history else None
    return {
        "run": str(record.place),
        "layers": len(record.spec.layers),
        "parameters": parameters(record.spec),
        "steps": last.step if last else 0,
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "held_out_loss": record.held_out_loss,
        "bits_per_byte": record.bits_per_byte,
        "mfu": last.mfu if last else None,
        "state": record.state,
    }
