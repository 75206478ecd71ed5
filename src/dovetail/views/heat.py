"""Heat maps: matrices with labeled rows and columns, one panel each, as a picture or as one HTML page.

    values ≥ 0    color follows √(value / limit), so that small ones stay visible; an exact 0 stays blank
    signed        likewise from −limit to limit, in two colors

The page holds the values as one byte each (base64), draws them on a canvas and fetches nothing: 8 heads of 512 tokens take
2.8 MB. It shows one panel large, all as small multiples, and the tokens and the value under the pointer.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import DovetailError, printable
from dovetail.disk.atomic import write_atomically
from dovetail.look.lenses import Lens
from dovetail.look.sweeps import Sweep
from dovetail.views.figure import GREY, INK, new_figure, write_figure
from dovetail.views.page import Page, body

SHADES = ("#f4f6fb", "#c6d4ee", "#7fa3dc", "#2f5fb3", "#142a5c")
BELOW = ("#6b2a0c", "#c8672f", "#f0c3a4")
BLANK = "#ffffff"
MOST = 96  # rows and columns of a picture: more labels are too small to read
MOST_ON_PAGE, MOST_PANELS = 1024, 64


class Heat(NamedTuple):
    """What a heat map shows."""

    title: str
    what: str  # a value is: "attention prob"
    panels: Sequence[str]
    values: Tensor  # (panels, rows, columns)
    rows: Sequence[str]
    columns: Sequence[str]
    words: Sequence[str] = ()  # in the cells, row by row; of one panel

    @property
    def signed(self) -> bool:
        """Whether some values are negative."""
        return bool((self.values < 0).any())

    @property
    def limit(self) -> float:
        """The value of the darkest color."""
        largest = float(self.values.abs().max())
        return 1.0 if largest == 0 or (not self.signed and largest <= 1) else largest  # so that maps of probs compare


def lens_heat(lens: Lens, labels: Sequence[str], words: Sequence[str], title: str) -> Heat:
    """Return the table of a lens for one text: the most probable token and its prob by layer and position. `words` are those
    tokens, layer by layer."""
    return Heat(title, "prob", ("lens",), lens.probs[:, 0, :, 0][None], lens.addresses, labels, words)


def sweep_heat(result: Sweep, labels: Sequence[str] = (), title: str = "") -> Heat:
    """Return the effects of a sweep: a row per address, a column per index, with `labels` as the names of the indices."""
    addresses, effects = result.table()
    columns = list(labels) or [str(i) for i in range(effects.shape[1])]
    if len(columns) != effects.shape[1]:
        raise DovetailError(f"labels: there are {len(columns)}; the sweep has {effects.shape[1]} indices per address")
    return Heat(title or "Effect of each intervention", "effect", ("effect",), effects[None], addresses, columns)


def draw_heat(heat: Heat, path: str | Path) -> None:
    """Write a heat map to a .png, .svg, .pdf or .html file."""
    check_size(path, len(heat.rows), len(heat.columns), len(heat.panels))
    if Path(path).suffix.lower() == ".html":
        write_atomically(path, heat_page(heat).whole())
    else:
        _draw(heat, path)


def check_size(path: str | Path | None, rows: int, columns: int, panels: int = 1) -> None:
    """Raise DovetailError for more than a picture, or a page, can show."""
    on_page = path is not None and Path(path).suffix.lower() == ".html"
    most = MOST_ON_PAGE if on_page else MOST
    if (longest := max(rows, columns)) > most or not min(rows, columns):
        more = "" if on_page else f", or write an .html page of up to {MOST_ON_PAGE:,}"
        count = longest if min(rows, columns) else 0
        raise DovetailError(f"{count} tokens do not fit a map; give a text of 1 to {most:,} tokens{more}")
    if panels > MOST_PANELS:
        raise DovetailError(f"heads: {panels:,} panels do not fit a map; name up to {MOST_PANELS} of them")


def heat_page(heat: Heat) -> Page:
    """Return the page."""
    scaled = (heat.values.detach().to("cpu", torch.float32) / heat.limit).clamp(-1, 1)
    root = scaled.abs().sqrt() * scaled.sign()
    tiles = (root * 127 + 128 if heat.signed else (root * 255)).round().to(torch.uint8)
    names = {name: [printable(str(label)) for label in labels] for name, labels in heat._asdict().items() if name in NAMES}
    values = {"what": printable(heat.what), "signed": heat.signed, "limit": heat.limit}
    data = {**names, **values, "words": names["words"] or None, "tiles": base64.b64encode(tiles.numpy().tobytes()).decode()}
    span = f"−{heat.limit:.3g} to {heat.limit:.3g}" if heat.signed else f"0 to {heat.limit:.3g}"
    note = f"{len(heat.rows)} rows × {len(heat.columns)} columns; color: {heat.what}, {span}, by its square root"
    return Page(heat.title, body("heat.html", title=heat.title, note=note, data=data))


NAMES = ("panels", "rows", "columns", "words")


def _draw(heat: Heat, path: str | Path) -> None:
    figure = new_figure(1, 1)
    from matplotlib.colors import FuncNorm, LinearSegmentedColormap, PowerNorm

    limit, count = heat.limit, len(heat.panels)
    colors = LinearSegmentedColormap.from_list("heat", (*BELOW, BLANK, *SHADES[1:]) if heat.signed else SHADES)
    across = min(count, math.ceil(math.sqrt(count * 1.6)))
    down = math.ceil(count / across)
    height, size = _panel(len(heat.rows), count)
    width, column_size = _panel(len(heat.columns), count)
    if heat.words:
        width, height = 0.7 * len(heat.columns), max(0.3 * len(heat.rows), 1.0)
    figure.set_size_inches(across * width + 1.4, down * height + 1.2)
    root = (lambda x: abs(x) ** 0.5 * ((x > 0) * 2.0 - 1), lambda x: abs(x) * x)
    norm = FuncNorm(root, -limit, limit) if heat.signed else PowerNorm(0.5, 0, limit)
    grid, image = figure.subplots(down, across, squeeze=False), None
    for i, axes in enumerate(grid.flat):
        if i >= count:
            axes.set_visible(False)
            continue
        values = heat.values[i].detach().float().cpu()
        visible = torch.where(values != 0, values, torch.nan).numpy()
        shown = colors.with_extremes(bad=BLANK)
        image = axes.imshow(visible, cmap=shown, norm=norm, interpolation="nearest", aspect="auto" if heat.words else "equal")
        axes.set_title(heat.panels[i] if count > 1 else "", fontsize=10, color=INK, loc="left", pad=4)
        rows = heat.rows if i % across == 0 else [""] * len(heat.rows)
        columns = heat.columns if i + across >= count else [""] * len(heat.columns)
        axes.set_yticks(range(len(rows)), rows, fontsize=size, parse_math=False)
        axes.set_xticks(range(len(columns)), columns, fontsize=column_size, rotation=90, parse_math=False)
        axes.tick_params(length=0, pad=2, colors=INK)
        axes.spines[:].set_visible(False)
        axes.set_xticks([p - 0.5 for p in range(len(columns) + 1)], minor=True)
        axes.set_yticks([p - 0.5 for p in range(len(rows) + 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
        for k, word in enumerate(heat.words):
            dark = float(values.flatten()[k]) > 0.35 * limit
            place = (k % len(columns), k // len(columns), word)
            axes.text(*place, fontsize=6.5, ha="center", va="center", color=BLANK if dark else INK, parse_math=False)
    assert image is not None
    unit = [0.05, 0.2, 0.5, 1] if not heat.signed else [-1, -0.5, -0.1, 0.1, 0.5, 1]
    bar = figure.colorbar(
        image, ax=grid.ravel().tolist(), shrink=0.5, aspect=28, pad=0.02, ticks=[0, *(limit * t for t in unit)]
    )
    bar.ax.set_yticklabels([f"{x:.2g}" for x in (0, *(limit * t for t in unit))])
    bar.set_label(heat.what, fontsize=9, color=INK)
    bar.outline.set_visible(False)  # type: ignore[union-attr]
    bar.ax.tick_params(labelsize=8, colors=INK, color=GREY)
    figure.suptitle(heat.title, fontsize=12, color=INK, x=0.01, ha="left", parse_math=False)
    write_figure(figure, path)


def _panel(labels: int, panels: int) -> tuple[float, float]:
    """Return the side of a panel in inches, larger where there is one, and the size of a label in points, so that labels do not
    overlap."""
    side = min(9.0, max(1.0, 0.3 * labels)) if panels == 1 else min(6.0, max(2.3, 0.125 * labels))
    return side, max(3.5, min(8.5, 0.78 * 72 * side / labels))
