"""Attention maps: the attention probs of each head of a layer, one panel per head; rows are queries, columns are keys.

An encoder–decoder has the alignment of its cross attention: rows are the tokens of the decoder, columns those of the source.

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
from dovetail.core.fold import taps, walk
from dovetail.model import Model
from dovetail.transformer import Transformer
from dovetail.views.figure import GREY, INK, new_figure, write_figure

MOST_TOKENS = 96  # labels of more tokens are too small to read
SHADES = ("#f4f6fb", "#c6d4ee", "#7fa3dc", "#2f5fb3", "#142a5c")
BLANK = "#ffffff"


def attention_of(model: Transformer, tokens: Tensor, layer: int, source: Tensor | None = None) -> Tensor:
    """Return the attention probs (heads, n, n) of one layer for tokens (n,); those of cross attention (heads, n, m) for a
    source (m,) of an encoder–decoder."""
    for ids in (tokens, source):
        if ids is not None and not 0 < len(ids) <= MOST_TOKENS:
            raise DovetailError(f"{len(ids)} tokens do not fit a map; give a text of 1 to {MOST_TOKENS} tokens")
    depth = len(model.part.layers)
    if not -depth <= layer < depth:
        raise SpecError(f"layers.{layer}", "there is no such layer", f"layers are 0 to {depth - 1}")
    branch = "mixer" if source is None else "cross"
    address = f"layers.{layer % depth}.{branch}.pattern"
    _check_mapped(model.part, address)
    pattern = model.trace(tokens[None], address, source=None if source is None else source[None])[address][0]
    check_result(pattern, address)
    return pattern


def _check_mapped(spec: Model, address: str) -> None:
    """Raise SpecError if the branch of a layer has no attention probs, with the layers that have some."""
    path, name = address.rpartition(".")[0], address.split(".", 2)[2]
    mapped = [tap.split(".")[1] for tap in taps(spec) if tap.startswith("layers.") and tap.split(".", 2)[2] == name]
    if address.split(".")[1] in mapped:
        return
    part = {node: part.kind for node, part, _ in walk(spec)}.get(path)
    problem = "the layer has no such branch" if part is None else f"{part} computes no attention probs, so it has no map"
    raise SpecError(path, problem, f"layers with a map: {', '.join(mapped)}" if mapped else "no layer of this model has a map")


def draw_map(
    pattern: Tensor,
    labels: Sequence[str],
    heads: Sequence[int],
    path: str | Path,
    title: str,
    columns: Sequence[str] | None = None,
) -> None:
    """Draw one panel per head of `heads` from attention probs (all heads, n, m), with the tokens as labels: those of the rows,
    and those of the columns if they differ."""
    columns = labels if columns is None else columns
    for head in heads:
        if not 0 <= head < len(pattern):
            raise SpecError(f"heads.{head}", "there is no such head", f"heads are 0 to {len(pattern) - 1}")
    figure = new_figure(1, 1)
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("probs", SHADES).with_extremes(bad=BLANK)
    across = min(len(heads), math.ceil(math.sqrt(len(heads) * 1.6)))
    down = math.ceil(len(heads) / across)
    height, size = _panel(len(labels))
    width, column_size = _panel(len(columns))
    figure.set_size_inches(across * width + 1.4, down * height + 1.2)
    grid = figure.subplots(down, across, squeeze=False)
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
        rows = labels if first_in_row else [""] * len(labels)
        axes.set_yticks(range(len(labels)), rows, fontsize=size, parse_math=False)
        below = columns if last_in_column else [""] * len(columns)
        axes.set_xticks(range(len(columns)), below, fontsize=column_size, rotation=90, parse_math=False)
        axes.tick_params(length=0, pad=2, colors=INK)
        axes.spines[:].set_visible(False)
        axes.set_xticks([p - 0.5 for p in range(len(columns) + 1)], minor=True)
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
