"""Counts as people write them: 200M, 1.5B, 64k, 2e8."""

from __future__ import annotations

import math

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
