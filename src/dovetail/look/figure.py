"""What all plots share: a matplotlib figure without a window, plain axes, colors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.errors import DovetailError, FileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, BLUE, ORANGE = "#1f2430", "#8a90a0", "#2f5fb3", "#d9822b"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DovetailError('plots need matplotlib: pip install "dovetail[look]"') from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def quiet(axes: Axes) -> None:
    """Remove the frame at the top and the right, and color the ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure to a file, in the format of its suffix."""
    try:
        with warnings.catch_warnings():  # a character that the font lacks is drawn as a box
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: the picture cannot be written ({error})") from error
