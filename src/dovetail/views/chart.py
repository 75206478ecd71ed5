"""Curves with bands as SVG: the middle of several runs and the range that they cover, at the points that they have in common.

mean   ─────            the polygon goes along the highest values and back along the lowest
range  ▒▒▒▒▒
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

CANVAS = (600, 220)  # units
HUES = (215, 30, 140, 300, 185, 0, 55, 260)  # of the lines, in degrees
Points = Sequence[tuple[float, float]]  # (x, y), x rising


class ChartBand(NamedTuple):
    """One line with its band: where the points are on the canvas, and its color."""

    name: str
    hue: int
    line: str
    area: str


class Chart(NamedTuple):
    """Lines over a common pair of axes."""

    title: str
    x: str
    y: str
    bands: list[ChartBand]
    left: str  # the ends of the axes
    right: str
    low: str
    high: str


def band_chart(title: str, x: str, y: str, curves: Mapping[str, Sequence[Points]], logarithmic: bool = False) -> Chart | None:
    """Return the chart of groups of curves, each as its mean and range; None if no group has two points."""
    groups = {name: list(_common(some)) for name, some in curves.items()}
    points = [(across, value) for group in groups.values() for across, values in group for value in values]
    if not points or max(len(group) for group in groups.values()) < 2:
        return None
    scale = math.log if logarithmic else float
    ends = min(scale(across) for across, _ in points), max(scale(across) for across, _ in points)
    values = min(value for _, value in points), max(value for _, value in points)

    def place(across: float, value: float) -> str:
        over = (scale(across) - ends[0]) / ((ends[1] - ends[0]) or 1.0)
        down = (values[1] - value) / ((values[1] - values[0]) or 1.0)
        return f"{over * CANVAS[0]:.1f},{down * CANVAS[1]:.1f}"

    bands: list[ChartBand] = []
    for i, (name, group) in enumerate(groups.items()):
        line = " ".join(place(across, sum(some) / len(some)) for across, some in group)
        around = [*((across, max(some)) for across, some in group), *((across, min(some)) for across, some in reversed(group))]
        bands.append(ChartBand(name, HUES[i % len(HUES)], line, " ".join(place(*point) for point in around)))
    shown = [_number(math.exp(end) if logarithmic else end) for end in ends]
    return Chart(title, x, y, bands, *shown, *(f"{value:.3f}" for value in values))


def _number(value: float) -> str:
    """A number at the end of an axis: 2,048, 4.55e+08, 0.01."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _common(curves: Sequence[Points]) -> Iterator[tuple[float, list[float]]]:
    """(mean x, values) at the first, second … point of the curves of a group, as far as all have one."""
    for column in zip(*curves, strict=False):
        finite = [(across, value) for across, value in column if math.isfinite(value)]
        if finite:
            yield sum(across for across, _ in finite) / len(finite), [value for _, value in finite]
