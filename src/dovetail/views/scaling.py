"""The scaling law of an arm as tables and charts: its numbers, sizes that were held out, the frontier, IsoFLOP curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail.base.units import count, flops
from dovetail.experiments.ladder_fit import ArmScaling
from dovetail.experiments.scaling import Estimate
from dovetail.views.blocks import TextTable, View
from dovetail.views.chart import Chart, band_chart

NUMBERS = ("", "value", "95 % interval")
HELD_OUT = ("held out", "parameters", "tokens", "predicted", "95 % interval", "measured", "in it")
FRONTIER = ("best at", "parameters", "tokens", "loss")


def scaling_view(scaling: ArmScaling) -> Iterator[View]:
    """Yield what a terminal shows."""
    if scaling.fit is not None:
        yield f"{scaling.group}: L(N, D) = E + A/N^alpha + B/D^beta, fitted to {len(scaling.fit.runs)} runs"
        for table in scaling_tables(scaling):
            yield from (table, "")


def scaling_tables(scaling: ArmScaling) -> Iterator[TextTable]:
    """Yield the numbers of the law, the sizes that were held out, and the frontier."""
    if scaling.fit is None:
        return
    yield TextTable(NUMBERS, number_rows(scaling.fit.numbers()))
    if scaling.predictions:
        rows = [
            (
                at.arm,
                f"{at.parameters:,}",
                f"{at.tokens:,}",
                f"{at.predicted.value:.4f}",
                f"{at.predicted.low:.4f} to {at.predicted.high:.4f}",
                f"{at.measured:.4f}",
                "yes" if at.holds else "no",
            )
            for at in scaling.predictions
        ]
        yield TextTable(HELD_OUT, rows)
    if scaling.has_frontier:
        frontier = scaling.fit.frontier()
        yield TextTable(
            FRONTIER,
            [(flops(at["flops"]), count(at["parameters"]), count(at["tokens"]), f"{at['loss']:.4f}") for at in frontier],
        )


def number_rows(numbers: Mapping[str, Estimate]) -> list[tuple[str, str, str]]:
    """The rows of NUMBERS."""
    return [(name, f"{v:.4g}", f"{low:.4g} to {high:.4g}") for name, (v, low, high) in numbers.items()]


def scaling_charts(scaling: Mapping[str, ArmScaling]) -> Iterator[Chart]:
    """Yield the IsoFLOP curves of each arm, and the frontiers of all."""
    for group, one in scaling.items():
        curves = {flops(at): some for at, some in one.isoflops().items()}
        by = "measured" if one.measured else "of the law"
        if chart := band_chart(f"IsoFLOP curves of {group}, {by}", "parameters", "nats per token", curves, logarithmic=True):
            yield chart
    frontiers = {
        group: [[(at["flops"], at["loss"]) for at in one.fit.frontier()]]
        for group, one in scaling.items()
        if one.fit is not None and one.has_frontier
    }
    if chart := band_chart("Compute-optimal frontier", "training FLOPs", "nats per token", frontiers, logarithmic=True):
        yield chart
