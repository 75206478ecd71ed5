"""The plots of `learn.py`, each from the data of one experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trials import LONG, SHORT

from dovetail.views.curve import smoothed
from dovetail.views.figure import BLUE, GREY, INK, ORANGE, new_figure, quiet, write_figure

GREEN, RED, PURPLE = "#3c8d5a", "#c0463f", "#7a5ba8"
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)


def mean_of(runs: Sequence[Sequence[float]]) -> list[float]:
    """The mean over seeds at each position."""
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def draw_recall(data: dict[str, Any], path: Path) -> None:
    """A dot for every seed, a bar for the mean."""
    figure = new_figure(7.6, 3.6)
    panels = figure.subplots(1, len(data["shares"]), sharey=True)
    for axes, (task, by_mixer) in zip(panels, data["shares"].items(), strict=True):
        for x, ((_, shares), color) in enumerate(zip(by_mixer.items(), COLOURS, strict=False)):
            axes.bar(x, statistics.fmean(shares), 0.55, color=color, alpha=0.35)
            spread = [x + 0.07 * (i - (len(shares) - 1) / 2) for i in range(len(shares))]
            axes.scatter(spread, shares, s=16, color=color, zorder=3)
        axes.set_xticks(range(len(by_mixer)), list(by_mixer))
        axes.set_title(task, color=INK, fontsize=10, loc="left")
        for goal in (0.95, 0.6):
            axes.axhline(goal, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 1.02)
        quiet(axes)
    panels[0].set_ylabel("accuracy", color=INK)
    figure.suptitle(
        "Length 32, vocabulary 16, two layers of width 32; one dot per seed", fontsize=11, color=INK, x=0.01, ha="left"
    )
    write_figure(figure, path)


def draw_lengths(data: dict[str, Any], path: Path) -> None:
    """Perplexity over four times the training length; one thin line per seed."""
    figure = new_figure(7.6, 4.4)
    axes = figure.add_subplot()
    for (name, seeds), color in zip(data["losses"].items(), COLOURS, strict=True):
        for seed in seeds:
            axes.plot([math.exp(loss) for loss in smoothed(seed, 6)], color=color, alpha=0.2, linewidth=0.7)
        axes.plot([math.exp(loss) for loss in smoothed(mean_of(seeds), 6)], color=color, linewidth=1.8, label=name)
    axes.axvline(SHORT, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(f" trained up to {SHORT}", (SHORT, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color=GREY)
    axes.set_yscale("log")
    axes.set_xlim(0, LONG)
    axes.set_xlabel("position", color=INK)
    axes.set_ylabel("perplexity", color=INK)
    axes.set_title(f"Trained on {SHORT} tokens, evaluated on {LONG}", color=INK, fontsize=11, loc="left")
    axes.legend(frameon=False, fontsize=9)
    quiet(axes)
    write_figure(figure, path)


def draw_reach(data: dict[str, Any], path: Path) -> None:
    """Gradient norms against distance, before and after training."""
    figure = new_figure(8.4, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"fresh": "initial weights", "trained": f"after {data['steps']} steps on text"}
    for axes, (when, title) in zip(panels, titles.items(), strict=True):
        for (name, norms), color in zip(data["norms"].items(), COLOURS, strict=False):
            for seed in norms[when]:
                axes.plot(seed, color=color, alpha=0.2, linewidth=0.7)
            logs = mean_of([[math.log(max(norm, 1e-300)) for norm in seed] for seed in norms[when]])
            axes.plot([math.exp(log) for log in logs], color=color, linewidth=1.8, label=name)
        axes.set_yscale("log")
        axes.set_xlim(0, data["length"] - 1)
        axes.set_xlabel("distance in tokens", color=INK)
        axes.set_title(title, color=INK, fontsize=10, loc="left")
        quiet(axes)
    panels[0].set_ylabel("gradient norm", color=INK)
    panels[1].legend(frameon=False, fontsize=9)
    title = "Gradient of the last token's loss at earlier tokens; one layer of width 32"
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    write_figure(figure, path)


def draw_wires(data: dict[str, Any], path: Path) -> None:
    """The losses of each run; one thin line per seed, up to where it diverged."""
    figure = new_figure(7.6, 4.2)
    axes = figure.add_subplot()
    styles = ((BLUE, "-"), (BLUE, "--"), (ORANGE, "-"), (ORANGE, "--"))
    for (name, runs), (color, style) in zip(data["curves"].items(), styles, strict=True):
        steady = [[loss for loss in run if loss is not None] for run in runs]
        for run in steady:
            axes.plot(smoothed(run, 5), color=color, alpha=0.2, linewidth=0.7)
        shortest = min(map(len, steady))
        axes.plot(smoothed(mean_of([run[:shortest] for run in steady]), 5), style, color=color, linewidth=1.8, label=name)
    axes.axhline(data["alone"], color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        "token frequencies only ", (1, data["alone"]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
    )
    axes.set_xlim(0, data["steps"])
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.set_title(f"{data['depth']} layers: pre-norm and post-norm", color=INK, fontsize=11, loc="left")
    axes.legend(frameon=False, fontsize=9)
    quiet(axes)
    write_figure(figure, path)


PICTURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "recall": draw_recall,
    "lengths": draw_lengths,
    "reach": draw_reach,
    "wires": draw_wires,
}
