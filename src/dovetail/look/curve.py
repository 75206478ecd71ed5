"""A training run as a picture: loss against tokens seen, and the loss on held-out data."""

from __future__ import annotations

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


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """A running mean: each new value counts for `weight`, and early ones are not drawn towards zero."""
    out: list[float] = []
    total = share = 0.0
    for value in values:
        total = (1 - weight) * total + weight * value
        share = (1 - weight) * share + weight
        out.append(total / share)
    return out


def draw_losses(points: Sequence[Seen], path: str | Path, title: str) -> None:
    """Draw the run's losses to a file."""
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    seen = [point.tokens / 1e3 for point in points]
    losses = [point.loss for point in points]
    weight = min(1.0, max(0.02, 8 / len(losses)))  # over about an eighth of a short run, fifty steps of a long one
    held = [(point.tokens / 1e3, point.validation) for point in points if point.validation is not None]
    axes.plot(seen, losses, color=BLUE, alpha=0.22, linewidth=0.8)
    axes.plot(seen, smoothed(losses, weight), color=BLUE, linewidth=1.8, label="training, running mean")
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
