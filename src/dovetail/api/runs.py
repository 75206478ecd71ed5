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

from dovetail.api.options import OutFile
from dovetail.api.result import Event, Result, Watch, unwatched
from dovetail.base.errors import DovetailError, FileError
from dovetail.base.option import Option
from dovetail.disk.atomic import check_free
from dovetail.views.blocks import View
from dovetail.views.curve import draw_runs
from dovetail.views.page import Page
from dovetail.views.runs import run_curves, run_row, run_table, runs_page

if TYPE_CHECKING:
    from dovetail.training.compare_runs import RunComparison
    from dovetail.training.metrics import StepMetrics
    from dovetail.training.record import RunRecord

MOST = 8  # runs that are compared with the first, and drawn


@dc.dataclass(frozen=True, repr=False)
class RunList(Result):
    """Runs, and the comparison of the first with each of the others where there are at most MOST."""

    records: tuple[RunRecord, ...]
    unreadable: tuple[str, ...]  # errors of run directories that cannot be read
    comparisons: tuple[RunComparison, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [record.to_dict() for record in self.records],
            "unreadable": list(self.unreadable),
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }

    def view(self, width: int) -> View:
        table = run_table([record.to_dict() for record in self.records]) if self.records else "no runs here"
        return [table, self.rest(width)]

    def rest(self, width: int) -> View:
        compared = ["\n".join(["", f"{comparison.a} → {comparison.b}", *comparison.lines()]) for comparison in self.comparisons]
        return [*self.unreadable, *run_curves(self._histories(), width), *compared]

    def page(self) -> Page:
        table = run_table([record.to_dict() for record in self.records])
        compared = [(f"{one.a} → {one.b}", [line.strip() for line in one.lines()]) for one in self.comparisons]
        return Page("dovetail runs", runs_page(table, self._histories(), self.unreadable, compared))

    def _histories(self) -> list[tuple[StepMetrics, ...]]:
        """The metrics of the runs that are drawn."""
        return [record.history for record in self.records] if len(self.records) <= MOST else []


def runs(
    *directories: Annotated[
        str | Path, Option("Runs, or directories that hold runs (default: the working directory).", form="DIR", argument=True)
    ],
    plot: Annotated[str | Path | None, OutFile("Also draw the losses to a .png, .svg or .pdf file.")] = None,
    force: Annotated[bool, Option("Replace an existing file.")] = False,
    watch: Watch = unwatched,
) -> RunList:
    """Return the training runs in the directories (default: the working directory) and below them, up to four levels deep.

    Up to eight runs are compared with the first: what differs in spec and settings; whether their batches, tokens and the
    initial weights that both have are equal. `plot` writes their losses over each other to a .png, .svg or .pdf file;
    an existing one is replaced if `force`. `watch` is called with each run as soon as it is read.
    """
    from dovetail.training.compare_runs import compare_runs
    from dovetail.training.record import find_runs, read_record

    records: list[RunRecord] = []
    problems: list[str] = []
    places = find_runs([Path(directory) for directory in directories or (".",)])
    width = max((len(str(place)) for place in places), default=0)
    for place in places:
        try:
            records.append(read_record(place))
        except DovetailError as error:
            problems.append(str(error))
            continue
        data = records[-1].to_dict()
        watch(Event("run", data, run_row(len(records) - 1 if len(places) <= MOST else None, data, width, len(records) == 1)))
    if plot is not None:
        check_free(plot, force)
        draw_runs(_drawn(records), plot)
    compared = records[1:] if len(records) <= MOST else []
    return RunList(tuple(records), tuple(problems), tuple(compare_runs(records[0], other) for other in compared))


def _drawn(records: list[RunRecord]) -> dict[str, Any]:
    result = {str(record.place): record.history for record in records if record.history}
    if not result or len(result) > MOST:
        raise FileError(f"{len(result)} runs have losses to plot; name from 1 to {MOST} runs")
    return result
