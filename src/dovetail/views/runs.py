"""Training runs: a row each, their losses over each other, and what differs between the first and the others.

Curves on a terminal are in braille: a character holds 2 × 4 dots.

    4.10 ┤⠉⠢⡀
         │  ⠈⠢⣀⡀
    1.85 ┤     ⠈⠉⠒⠤⠤ a
         0             51,200 tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dovetail.base.units import count
from dovetail.views.blocks import TextTable, View
from dovetail.views.curve import smoothed
from dovetail.views.page import body

if TYPE_CHECKING:
    from dovetail.training.metrics import StepMetrics

NUMBERS = ("parameters", "tokens", "loss", "held-out", "bits/byte")
COLUMNS = ("", "run", "layers", *NUMBERS, "state")
WIDTHS = (6, 10, 15, 6, 8, 9)  # of the columns from `layers` on, of rows that are printed one at a time
LOSSES = ("loss", "held_out_loss", "bits_per_byte")
LETTERS = "abcdefgh"
CANVAS = (600, 180)  # units of the picture of the losses
HUES = (215, 30, 140, 300, 185, 0, 55, 260)  # of the lines, in degrees
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character
COLORS = ("blue", "dark_orange", "green", "magenta", "cyan", "red", "yellow", "white")
Curve = Sequence[tuple[float, float]]  # (x, y), x rising


def run_table(runs: Sequence[Mapping[str, Any]]) -> TextTable:
    """The table of runs, as `to_dict` has them; each has a letter if all are drawn."""
    lettered = len(runs) <= len(LETTERS)
    return TextTable(COLUMNS, [_cells(i if lettered else None, run) for i, run in enumerate(runs)], right=NUMBERS)


def run_row(number: int | None, run: Mapping[str, Any], width: int, header: bool) -> TextTable:
    """A row of the table, that is printed when it is known; `width` is that of the longest name."""
    return TextTable(COLUMNS, [_cells(number, run)], right=NUMBERS, header=header, widths=(1, width, *WIDTHS))


def _cells(number: int | None, run: Mapping[str, Any]) -> tuple[str, ...]:
    losses = ("–" if run[key] is None else f"{run[key]:.3f}" for key in LOSSES)
    letter = "" if number is None else LETTERS[number]
    return letter, run["run"], str(run["layers"]), count(run["parameters"]), f"{run['tokens']:,}", *losses, run["state"]


def run_curves(histories: Sequence[Sequence[StepMetrics]], width: int) -> Iterator[View]:
    """Yield the losses of runs over each other on a terminal, if there are any."""
    if any(len(history) > 1 for history in histories):
        curves = {letter: _curve(history) for letter, history in zip(LETTERS, histories, strict=False)}
        yield from ("", draw_terminal(curves, min(width, 100), unit=" tokens"))


def _curve(history: Sequence[StepMetrics]) -> Curve:
    losses = smoothed([metrics.loss for metrics in history], len(history) // 50)
    return [(float(metrics.tokens), loss) for metrics, loss in zip(history, losses, strict=True)]


def runs_page(
    table: TextTable,
    histories: Sequence[Sequence[StepMetrics]],
    unreadable: Sequence[str],
    compared: Sequence[tuple[str, Sequence[str]]],
) -> str:
    """Return the content of the page: the table, the losses as lines, and what differs."""
    curves = [_curve(history) for history in histories]
    points = [point for curve in curves for point in curve]
    most = max((tokens for tokens, _ in points), default=0.0)
    low, high = min((loss for _, loss in points), default=0.0), max((loss for _, loss in points), default=0.0)

    def place(tokens: float, loss: float) -> str:
        across, down = tokens / (most or 1.0), (high - loss) / ((high - low) or 1.0)
        return f"{across * CANVAS[0]:.1f},{down * CANVAS[1]:.1f}"

    lines = [
        (letter, hue, " ".join(place(*point) for point in curve))
        for letter, hue, curve in zip(LETTERS, HUES, curves, strict=False)
        if len(curve) > 1
    ]
    axes = {"low": f"{low:.3f}", "high": f"{high:.3f}", "most": f"{most:,.0f}"}
    return body("runs.html", table=table, lines=lines, canvas=CANVAS, **axes, unreadable=unreadable, compared=compared)


def training_view(run: Mapping[str, Any], metrics: Mapping[str, float], sample: tuple[str, str] | None) -> str:
    """What a run did, from its `to_dict`: its speed and its losses, a sample (prompt, answer), and where it was written."""
    mfu = "" if run["mfu"] is None else f", MFU {run['mfu']:.1%}"
    bits = f", {run['held_out_bits_per_byte']:.3f} bits per byte" if "held_out_bits_per_byte" in run else ""
    lines = [
        f"{run['steps']:,} steps, {run['tokens']:,} tokens in {run['seconds']:.0f} s: "
        f"{run['tokens_per_second']:,} tokens/s{mfu}" + (" (interrupted)" if run["interrupted"] else ""),
        f"loss of step 1: {run['first_loss']:.3f}; train loss (mean of the last {run['train_loss_steps']} steps): "
        f"{run['train_loss']:.3f}; held-out loss: {run['held_out_loss']:.3f}"
        + "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        + bits,
    ]
    if sample is not None and sample[1]:
        lines += ["", f"a sample after {sample[0]!r}:", "", "".join(sample), ""]
    if run["directory"] is not None:
        lines.append(f"written to {run['directory']}")
    return "\n".join(lines)


def draw_terminal(curves: Mapping[str, Curve], width: int, height: int = 10, unit: str = "") -> Text:
    """Return the curves in `width` × `height` characters with axes; each is named by its key at its last point."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return Text("")
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [f"{high:.3f}", f"{low:.3f}"]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 3 - max(map(len, curves)))
    dots: list[list[int]] = [[0] * columns for _ in range(height)]
    colors: list[list[str]] = [[""] * columns for _ in range(height)]
    ends: dict[int, list[tuple[str, str]]] = {}
    for (name, curve), color in zip(curves.items(), COLORS * (1 + len(curves) // len(COLORS)), strict=False):
        row = 0
        for x, y in _dense(curve, right, 2 * columns):
            column = min(2 * columns - 1, int(x / right * (2 * columns - 1)))
            row = round((high - y) / ((high - low) or 1.0) * (4 * height - 1))
            dots[row // 4][column // 2] |= DOTS[row % 4][column % 2]
            colors[row // 4][column // 2] = color
        if curve:
            ends.setdefault(row // 4, []).append((name, color))
    text = Text(no_wrap=True)
    for i in range(height):
        label = {0: labels[0], height - 1: labels[1]}.get(i, "")
        text.append(f"{label:>{margin}} {'┤' if label else '│'}", "dim")
        for bits, color in zip(dots[i], colors[i], strict=True):
            text.append(chr(0x2800 + bits) if bits else " ", color)
        for name, color in ends.get(i, ()):
            text.append(f" {name}", color)
        text.append("\n")
    last = f"{right:,.0f}{unit}"
    return text.append(f"{'':>{margin}}  0{last:>{columns - 1}}", "dim")


def _dense(curve: Curve, right: float, dots: int) -> Sequence[tuple[float, float]]:
    """The curve with enough points in between to be a line."""
    result: list[tuple[float, float]] = list(curve[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        count = max(1, min(4 * dots, int((x1 - x0) / (right or 1.0) * dots * 2)))
        result += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count + 1)]
    return result
