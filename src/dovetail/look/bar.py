"""A bar of text, to an eighth of a character."""

from __future__ import annotations

EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def bar(share: float, cells: int) -> str:
    """As much of so many characters as the share says."""
    full, rest = divmod(round(share * cells * 8), 8)
    return "█" * full + EIGHTHS[rest]
