"""Strings from outside, made safe to print: a server's answer or a tensor's name may hold terminal control sequences."""

from __future__ import annotations

import unicodedata


def printable(text: str, most: int = 300) -> str:
    """At most `most` characters on one line; each control or format character is shown as an escape like `\\x1b`."""
    shown = "".join(c if unicodedata.category(c)[0] != "C" else repr(c)[1:-1] for c in text[: most + 1])
    return shown if len(text) <= most else f"{shown[:most]}…"
