"""Strings from outside, made safe to print: a server's answer or a tensor's name may hold terminal control sequences."""

from __future__ import annotations

import unicodedata

LINES = "\n\t"
PROSE = LINES + "\u200c\u200d"  # zero-width joiners: parts of emoji, Persian and Indic words; they move and hide nothing
UNPRINTABLE = ("C", "Zl", "Zp")  # control, format, surrogate, private and unassigned characters; line and paragraph separators


def printable(text: str, most: int | None = 300, keep: str = "") -> str:
    """At most `most` characters; each control or format character that is not in `keep` is shown as an escape like `\\x1b`."""
    cut = text if most is None else text[: most + 1]
    shown = "".join(c if c in keep or not unicodedata.category(c).startswith(UNPRINTABLE) else repr(c)[1:-1] for c in cut)
    return shown if most is None or len(text) <= most else f"{shown[:most]}…"
