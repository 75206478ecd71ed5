"""Bars of block characters, with a resolution of an eighth of a character, and losses as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dovetail.views.blocks import TextTable, styled

if TYPE_CHECKING:
    from dovetail.training.metrics import StepMetrics

EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
BAR = 32  # characters of the longest bar
LEVELS = "▁▂▃▄▅▆▇█"
STYLES = {"before": "green", "after": "red", "healed": "cyan"}


def bar(fraction: float, cells: int) -> str:
    """Return a bar that fills this fraction of `cells` characters."""
    full, rest = divmod(round(fraction * cells * 8), 8)
    return "█" * full + EIGHTHS[rest]


def loss_table(losses: Mapping[str, float], history: Sequence[StepMetrics]) -> TextTable:
    """A bar for each loss, its difference from the first, and the losses during training."""
    most, rows = max(losses.values()), []
    for name, loss in losses.items():
        note = f"{loss - losses['before']:+.3f}" if name != "before" else ""
        if name == "healed":
            held_out = [losses["after"], *(p.val_loss for p in history if p.val_loss is not None)]
            note += f"   {history[-1].step:,} steps in {history[-1].seconds:.0f} s  {sparkline(held_out)}"
        rows.append(
            (f"  {name}", styled((f"{loss:.3f}", "bold")), styled((loss_bar(loss / most), STYLES[name])), styled((note, "dim")))
        )
    return TextTable(("name", "loss", "bar", "note"), rows, header=False)


def loss_bar(fraction: float) -> str:
    """A bar of up to BAR characters; a full one where the loss is not finite."""
    return bar(fraction if math.isfinite(fraction) else 1.0, BAR)


def sparkline(values: Sequence[float]) -> str:
    """One character per value, the highest the tallest."""
    low, high = min(values), max(values)
    return "".join(LEVELS[round((value - low) / ((high - low) or 1.0) * 7)] for value in values)
