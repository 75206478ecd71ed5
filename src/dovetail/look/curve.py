"""A training run as a picture: loss against tokens seen, and the loss on held-out data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dovetail.look.figure import BLUE, GREY, INK, ORANGE, new_figure, quiet, write_figure


class Seen(Protocol):
    """What is known after one step."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def validation(self) -> float | None: ...


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Each value's mean with up to `reach` neighbors on either side, as many on one as on the other: nothing lags."""
    sums = [0.0, *itertools.accumulate(values)]
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reaches)]


def draw_losses(points: Sequence[Seen], path: str | Path, title: str) -> None:
    """Draw the run's losses to a file."""
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    seen = [point.tokens / 1e3 for point in points]
    losses = [point.loss for point in points]
    held = [(point.tokens / 1e3, point.validation) for point in points if point.validation is not None]
    axes.plot(seen, losses, color=BLUE, alpha=0.22, linewidth=0.8)
    axes.plot(seen, smoothed(losses, len(losses) // 50), color=BLUE, linewidth=1.8, label="training")
    if held:
        label = f"held-out, {held[-1][1]:.3f} at the end"
        axes.plot(*zip(*held, strict=True), color=ORANGE, marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set_xlabel("thousand tokens seen", color=INK)
    axes.set_ylabel("loss, nats a token", color=INK)
    axes.set_title(title, color=INK, fontsize=11, loc="left", parse_math=False)
    axes.set_xlim(0, seen[-1])
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    quiet(axes)
    write_figure(figure, path)
