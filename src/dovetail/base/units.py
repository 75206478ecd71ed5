"""Counts, FLOPs and bytes as short text: 1.34 B, 1.34 GFLOP, 1.25 GiB; and counts that people write: 200M, 1.5B, 64k, 2e8."""

from __future__ import annotations

import math


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


SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_count(text: float | str) -> float:
    """Return the number that a text such as `200M` or `2e8` says; raise ValueError where it is none."""
    plain = str(text).strip()
    factor = SUFFIXES.get(plain[-1:], 1.0)
    try:
        number = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{str(text)[:40]!r} is not a count; write 200M, 1.5B or 2e8")
    return number
