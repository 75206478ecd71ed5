"""Curves on a terminal, in braille: a character holds 2 × 4 dots.

4.10 ┤⠉⠢⡀
     │  ⠈⠢⣀⡀
1.85 ┤     ⠈⠉⠒⠤⠤ a
     0             51,200 tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character
COLORS = ("blue", "dark_orange", "green", "magenta", "cyan", "red", "yellow", "white")
Curve = Sequence[tuple[float, float]]  # (x, y), x rising


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
    found: list[tuple[float, float]] = list(curve[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        count = max(1, min(4 * dots, int((x1 - x0) / (right or 1.0) * dots * 2)))
        found += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count + 1)]
    return found
