"""Compare architectures in a lab: paired runs, confidence sequences that hold at any number of seeds, a verdict per arm.

lab.yaml names a base, arms that change it, data, a budget and the smallest difference that matters (docs/lab.md). An arm trains
until its verdict is in. The same command continues a lab that was killed; no run is trained twice. The report is OUT/lab.html.

    dovetail lab lab.yaml
    dovetail lab lab.yaml --workers 2 --threads 1 -o positions
"""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import silent
from dovetail.api.options import OutDir
from dovetail.api.result import Event, Result, Watch, unwatched
from dovetail.api.train import train
from dovetail.api.train_steps import timed_steps
from dovetail.base.option import BatchSize, Option
from dovetail.disk.atomic import write_atomically
from dovetail.views.blocks import View
from dovetail.views.page import Page

if TYPE_CHECKING:
    from dovetail.experiments.report import LabReport
    from dovetail.experiments.verdict import ArmVerdict


@dc.dataclass(frozen=True, repr=False)
class LabResult(Result):
    """What a lab found."""

    report: LabReport

    @property
    def verdicts(self) -> Mapping[str, ArmVerdict]:
        """The verdict of each arm."""
        return self.report.verdicts

    def frame(self) -> dict[str, list[Any]]:
        """Return the runs as columns, for `pandas.DataFrame`."""
        return self.report.frame()

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()

    def view(self, width: int) -> View:
        from dovetail.views.lab import lab_view

        return lab_view(self.report)

    def page(self) -> Page:
        from dovetail.views.lab import lab_page

        return Page("dovetail lab", lab_page(self.report))


def lab(
    design: Annotated[str | Path | Mapping[str, Any], Option("The lab.yaml of the lab.", form="FILE", argument=True)],
    *,
    out: Annotated[
        str | Path | None, OutDir("The directory of its runs and its report (default: after the file).", short="-o")
    ] = None,
    workers: Annotated[int | None, BatchSize("Processes that train (default: as many as cores allow).")] = None,
    threads: Annotated[int, BatchSize("Threads of each process.")] = 1,
    cluster: Annotated[
        str | None,
        Option(
            "Train on the nodes of this Ray cluster instead, which share a file system (extra `cluster`).",
            form="HOST:PORT|auto",
        ),
    ] = None,
    watch: Watch = unwatched,
    progress: Callable[..., None] = silent,
) -> LabResult:
    """Train the arms of a lab until every verdict is in, and return the verdicts with all runs; `design` is lab.yaml, or its
    content. `out` is the directory (default: the name of the file), in which a lab that was killed is continued."""
    from dovetail.experiments.design import read_design
    from dovetail.experiments.lab import run_lab
    from dovetail.experiments.report import lab_report

    path = Path(out or ("lab" if isinstance(design, Mapping) else Path(design).stem))

    def decided(data: dict[str, Any], text: str) -> None:
        watch(Event("verdict", data, text))

    state = run_lab(read_design(design), path, train, workers, threads, cluster, decided, progress, timed_steps)
    result = LabResult(lab_report(state))
    write_atomically(path / "lab.html", result.to_html())
    write_atomically(path / "lab.json", json.dumps(result.to_dict(), indent=1))
    return result
