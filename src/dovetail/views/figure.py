"""What all plots share: a matplotlib figure without a window, plain axes, colors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.base.errors import DovetailError, FileError, install_command
from dovetail.disk.atomic import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
INK, GREY, BLUE, ORANGE = "#1f2430", "#8a90a0", "#2f5fb3", "#d9822b"
PALETTE = (BLUE, ORANGE, "#3a8f5c", "#a34fa3", "#2e9aa8", "#c0443c", "#8a7a2f", INK)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window."""
    first = "matplotlib" not in sys.modules
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DovetailError(f"plots need matplotlib: {install_command('plots')}") from error
    if first and Path(matplotlib.matplotlib_fname()).absolute().parent == Path.cwd():
        matplotlib.rcdefaults()  # settings of the working directory can have text set by LaTeX
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def quiet(axes: Axes) -> None:
    """Remove the frame at the top and the right, and color the ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure to exactly this file, as a whole or not at all, in the format of its suffix (PNG without one)."""
    form = Path(path).suffix.lower().removeprefix(".") or "png"
    if form not in FORMATS:
        raise FileError(f"{path}: .{form} is not a format of pictures; formats: {', '.join(f'.{name}' for name in FORMATS)}")
    from matplotlib import rc_context

    # a figure has the same bytes whenever it is written
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with warnings.catch_warnings(), writing(path) as file, rc_context({"svg.hashsalt": "dovetail"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # such a character is drawn as a box
        figure.savefig(file, dpi=160, format=form, metadata=dated)
