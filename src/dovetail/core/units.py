"""Counts, FLOPs and bytes as short text: 1.34 B, 1.34 GFLOP, 1.25 GiB."""

from __future__ import annotations


def count(number: float) -> str:
    """Format a count with three digits: 1.34 B."""
    return _scaled(number, "TBMk").rstrip()


def flops(number: float) -> str:
    """Format FLOPs with three digits: 1.34 GFLOP."""
    return f"{_scaled(number, 'EPTGMk')}FLOP"


def size(number: int) -> str:
    """Format bytes in powers of 1024: 1.25 GiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{number / 2**power:.2f} {unit}"
    return f"{number} B"


def _scaled(number: float, letters: str) -> str:
    for power, letter in zip(range(3 * len(letters), 0, -3), letters, strict=True):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {letter}"
    return f"{number:.0f} "
