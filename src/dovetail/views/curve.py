"""A plot of a training run: training loss and held-out loss against tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dovetail.views.figure import BLUE, GREY, INK, ORANGE, PALETTE, new_figure, quiet, write_figure


class StepLosses(Protocol):
    """The losses of one step."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def val_loss(self) -> float | None: ...


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return the centered moving average: the mean of each value and up to `reach` neighbors, as many on either side."""
    sums = [0.0, *itertools.accumulate(values)]
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reaches)]


def draw_losses(history: Sequence[StepLosses], path: str | Path, title: str) -> None:
    """Plot the losses of a run to a file."""
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    tokens = [metrics.tokens / 1e3 for metrics in history]
    losses = [metrics.loss for metrics in history]
    held_out = [(metrics.tokens / 1e3, metrics.val_loss) for metrics in history if metrics.val_loss is not None]
    axes.plot(tokens, losses, color=BLUE, alpha=0.22, linewidth=0.8)
    axes.plot(tokens, smoothed(losses, len(losses) // 50), color=BLUE, linewidth=1.8, label="training")
    if held_out:
        label = f"held-out, {held_out[-1][1]:.3f} at the end"
        axes.plot(*zip(*held_out, strict=True), color=ORANGE, marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set_xlabel("tokens, thousands", color=INK)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.set_title(title, color=INK, fontsize=11, loc="left", parse_math=False)
    axes.set_xlim(0, tokens[-1])
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    quiet(axes)
    write_figure(figure, path)


def draw_coordinates(
    widths: Sequence[int], changes: Sequence[tuple[str, Sequence[float]]], path: str | Path, title: str
) -> None:
    """Plot the change of each activation over widths to a file; the logits stand out."""
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    for i, (address, values) in enumerate(changes):
        last = i == len(changes) - 1
        axes.plot(widths, values, color=ORANGE if last else BLUE, alpha=1.0 if last else 0.45, marker="o", markersize=3)
        axes.annotate(address, (widths[-1], values[-1]), xytext=(5, 0), textcoords="offset points", fontsize=7, color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(widths), [f"{width:,}" for width in widths])
    axes.set_xlabel("width", color=INK)
    axes.set_ylabel("change of the activation, rms", color=INK)
    axes.set_title(title, color=INK, fontsize=11, loc="left", parse_math=False)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    quiet(axes)
    write_figure(figure, path)


def draw_runs(runs: Mapping[str, Sequence[StepLosses]], path: str | Path) -> None:
    """Plot the losses of several runs over each other: training loss, smoothed, and held-out loss as points."""
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    for (name, history), color in zip(runs.items(), itertools.cycle(PALETTE), strict=False):
        losses = [metrics.loss for metrics in history]
        held_out = [(metrics.tokens / 1e3, metrics.val_loss) for metrics in history if metrics.val_loss is not None]
        tokens = [metrics.tokens / 1e3 for metrics in history]
        axes.plot(tokens, smoothed(losses, len(losses) // 50), color=color, linewidth=1.6, label=name)
        if held_out:
            axes.plot(*zip(*held_out, strict=True), color=color, marker="o", markersize=4, linewidth=0.8, linestyle=":")
    axes.set_xlabel("tokens, thousands", color=INK)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.set_title("training loss, and held-out loss as points", color=INK, fontsize=11, loc="left")
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    for text in axes.legend(frameon=False, fontsize=9).get_texts():
        text.set_parse_math(False)
    quiet(axes)
    write_figure(figure, path)
