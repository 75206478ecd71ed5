"""Attention maps: the attention probs of each head of a layer, one panel per head; rows are queries, columns are keys.

Color follows √prob, so that small probs stay visible beside large ones; masked pairs stay blank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dovetail.core.errors import DovetailError, SpecError
from dovetail.core.finite import check_result
from dovetail.look.figure import GREY, INK, new_figure, write_figure
from dovetail.model import ModelModule
from dovetail.tracing import trace

MOST_TOKENS = 96  # labels of more tokens are too small to read
SHADES = ("#f4f6fb", "#c6d4ee", "#7fa3dc", "#2f5fb3", "#142a5c")
BLANK = "#ffffff"


def attention_of(model: ModelModule, tokens: Tensor, layer: int) -> Tensor:
    """Return the attention probs (heads, n, n) of one layer for tokens (n,)."""
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise DovetailError(f"{len(tokens)} tokens do not fit a map; give a text of 1 to {MOST_TOKENS} tokens")
    depth = len(model.part.layers)
    if not -depth <= layer < depth:
        raise SpecError(f"layers.{layer}", "there is no such layer", f"layers are 0 to {depth - 1}")
    address = f"layers.{layer % depth}.mixer.pattern"
    pattern = trace(model, tokens[None], address)[address][0]
    check_result(pattern, address)
    return pattern


def draw_map(pattern: Tensor, labels: Sequence[str], heads: Sequence[int], path: str | Path, title: str) -> None:
    """Draw one panel per head of `heads` from attention probs (all heads, n, n), with the tokens as labels."""
    for head in heads:
        if not 0 <= head < len(pattern):
            raise SpecError(f"heads.{head}", "there is no such head", f"heads are 0 to {len(pattern) - 1}")
    figure = new_figure(1, 1)
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("probs", SHADES).with_extremes(bad=BLANK)
    across = min(len(heads), math.ceil(math.sqrt(len(heads) * 1.6)))
    down = math.ceil(len(heads) / across)
    side, size = _panel(len(labels))
    figure.set_size_inches(across * side + 1.4, down * side + 1.2)
    grid = figure.subplots(down, across, squeeze=False)
    positions = range(len(labels))
    image = None
    for i, axes in enumerate(grid.flat):
        if i >= len(heads):
            axes.set_visible(False)
            continue
        probs = pattern[heads[i]].float().cpu()
        visible = torch.where(probs > 0, probs, torch.nan).numpy()
        image = axes.imshow(visible, cmap=colors, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        axes.set_title(f"head {heads[i]}", fontsize=10, color=INK, loc="left", pad=4)
        first_in_row, last_in_column = i % across == 0, i + across >= len(heads)
        axes.set_yticks(positions, labels if first_in_row else [""] * len(labels), fontsize=size, parse_math=False)
        axes.set_xticks(
            positions, labels if last_in_column else [""] * len(labels), fontsize=size, rotation=90, parse_math=False
        )
        axes.tick_params(length=0, pad=2, colors=INK)
        axes.spines[:].set_visible(False)
        axes.set_xticks([p - 0.5 for p in range(len(labels) + 1)], minor=True)
        axes.set_yticks([p - 0.5 for p in range(len(labels) + 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    assert image is not None
    bar = figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.5, aspect=28, pad=0.02, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.set_label("attention prob", fontsize=9, color=INK)
    bar.outline.set_visible(False)  # type: ignore[union-attr]
    bar.ax.tick_params(labelsize=8, colors=INK, color=GREY)
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left", parse_math=False)
    write_figure(figure, path)


def _panel(tokens: int) -> tuple[float, float]:
    """Return the side of a panel in inches and the size of a label in points, so that labels do not overlap."""
    side = min(6.0, max(2.3, 0.125 * tokens))
    return side, max(3.5, min(8.5, 0.78 * 72 * side / tokens))
