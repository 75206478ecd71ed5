"""Measure what a model does with a long context: how often it finds what stands far back, by length and depth.

The tasks are of RULER's kinds, over the ordinary tokens of the model's vocabulary: a needle in noise, several keys, chains of
look-ups, variable tracking, aggregation, far copying. The used length of a task is the longest up to which its accuracy reaches
the threshold; the claimed length is a promise. A text file adds the loss by position. (For linear probes of activations see
`dovetail.look`.)

    dovetail probe llama-tiny-trained --lengths 64 128 256 --claimed 256
    dovetail probe model --task needle --task '{kind: mqar, pairs: 32}' --lengths 128 --json
    dovetail probe model --text novel.txt --html probe.html
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import silent
from dovetail.api.options import InDir, InFile, Length, Seed
from dovetail.api.result import Result
from dovetail.base.option import BatchSize, Option
from dovetail.views.blocks import StyledText, TextTable, View, styled

if TYPE_CHECKING:
    from dovetail.data.tasks.task import SyntheticTask
    from dovetail.experiments.long_context import ContextReport, LossBand
    from dovetail.model.transformer import Transformer


@dc.dataclass(frozen=True, repr=False)
class ContextProbe(Result):
    """What a model does with its context."""

    name: str
    report: ContextReport
    losses: tuple[LossBand, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        losses = {"loss_by_position": [dc.asdict(band) for band in self.losses]} if self.losses else {}
        return {"model": self.name, **self.report.to_dict(), **losses}

    def view(self, width: int) -> View:
        report = self.report
        columns = ("task", "depth", *(f"{length:,}" for length in report.lengths), "used length")
        claimed = "no limit is declared" if report.claimed is None else f"{report.claimed:,} claimed"
        used = f"{report.used():,} used" if report.used() else "none of them used"
        summary = f"{claimed}, {used} (mean of the tasks ≥ {report.threshold:g})"
        notes = ["* the decode state is too small: no weights of this architecture exceed the accuracy after ≤"]
        bounded = any(cell.bound < 1 for cell in report.cells)
        views: list[View] = [summary, "", TextTable(columns, list(self._rows()), right=columns[1:]), *(notes * bounded)]
        if self.losses:
            rows = [(f"{band.first:,} to {band.last:,}", f"{band.loss:.3f}") for band in self.losses]
            views += ["", TextTable(("position", "loss, nats per token"), rows, right=("loss, nats per token",))]
        return views

    def _rows(self) -> Iterator[Sequence[str | StyledText]]:
        """A row per task and depth, with the accuracy at each length."""
        report = self.report
        for task in report.tasks:
            cells = [cell for cell in report.cells if cell.task == task]
            for i, depth in enumerate(dict.fromkeys(cell.depth for cell in cells)):
                at = {cell.length: cell for cell in cells if cell.depth == depth}
                shown = [
                    styled((f"{cell.accuracy:.2f}", "green" if cell.accuracy >= report.threshold else "red"))
                    if cell.bound == 1
                    else styled((f"{cell.accuracy:.2f}", "red"), f" ≤{cell.bound:.2f}*")
                    for cell in (at[length] for length in report.lengths)
                ]
                first = (task, f"{report.used(task):,}") if i == 0 else ("", "")
                yield first[0], "" if depth is None else f"{depth:g}", *shown, first[1]


def probe(
    model: Annotated[Transformer | str | Path, InDir("A model directory.", argument=True)],
    *,
    task: Annotated[
        str | Mapping[str, Any] | SyntheticTask | Sequence[str | Mapping[str, Any] | SyntheticTask],
        Option(
            "A synthetic task of `dovetail train`, or its fields as YAML; may be given many times (default: needle, multi_key, "
            "multi_hop, variable_tracking, aggregation and far_copy).",
            repeat=True,
        ),
    ] = (),
    lengths: Annotated[Sequence[int], Length("The lengths, in tokens (default: 64 128 256 512 1024).")] = (),
    depths: Annotated[
        Sequence[float], Option("Where the answer stands, 0 the start, 1 the end (default: 0 0.25 0.5 0.75 1).")
    ] = (),
    rows: Annotated[int, BatchSize("Rows per length and depth.")] = 32,
    threshold: Annotated[float, Option("The accuracy from which a length counts as used.", low=0.0, high=1.0)] = 0.85,
    claimed: Annotated[int | None, Length("The length that the model promises (default: that of its positions).")] = None,
    chunk: Annotated[int, Length("Tokens that are computed at once, with the KV cache of those before.")] = 512,
    text: Annotated[
        str | Path | None, InFile("A text file: also measure the loss by position, up to the longest length.")
    ] = None,
    seed: Annotated[int, Seed("The seed of the rows.")] = 0,
    progress: Callable[..., None] = silent,
) -> ContextProbe:
    """Answer synthetic tasks on a grid of lengths and depths, and return the accuracies, the used length of each task, and with
    a `text` the loss by position up to the longest length. `task` is a name, a mapping, or several of them."""
    from dovetail.api.models import load
    from dovetail.experiments.long_context import ContextDesign, loss_by_position, measure_context
    from dovetail.spec.part import Part

    opened = load(model) if isinstance(model, (str, Path)) else model
    tasks = [task] if isinstance(task, (str, Mapping, Part)) else list(task)
    grid = {name: tuple(values) for name, values in (("lengths", lengths), ("depths", depths)) if values}
    design = ContextDesign.read(tasks, **grid, rows=rows, threshold=threshold, chunk=chunk, seed=seed)
    report = measure_context(opened, design, claimed, progress)
    losses = () if text is None else loss_by_position(opened, Path(text), max(design.lengths), design.rows)
    return ContextProbe(str(model) if isinstance(model, (str, Path)) else opened.spec.kind, report, losses)
