"""A bar of block characters, with a resolution of an eighth of a character."""

from __future__ import annotations

EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def bar(fraction: float, cells: int) -> str:
    """Return a bar that fills this fraction of `cells` characters."""
    full, rest = divmod(round(fraction * cells * 8), 8)
    return "█" * full + EIGHTHS[rest]
