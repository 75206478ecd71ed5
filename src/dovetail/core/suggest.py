"""Did-you-mean: the known names nearest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 3  # names that are suggested
CUTOFF = 0.6  # of difflib's ratio
LONGEST = 64  # characters that are compared: difflib takes quadratic time


def nearest(name: str, known: Iterable[str], most: int = MOST) -> list[str]:
    """Return the known names nearest to `name`, the nearest first.

    A name that contains it, or that it contains, is near. Dashes before a flag do not count.
    """
    name, names = name[:LONGEST].lower().lstrip("-"), {other.lower().lstrip("-"): other for other in known}
    close = difflib.get_close_matches(name, names, most, CUTOFF)
    holding = [other for other in names if min(len(name), len(other)) > 1 and (name in other or other in name)]
    close += [other for other in holding if other not in close]
    return [names[other] for other in close[:most]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean a or b?", or an empty string where no known name is near."""
    return f"did you mean {' or '.join(close)}?" if (close := nearest(name, known)) else ""


def names_or_nearest(name: str, known: Iterable[str], what: str) -> str:
    """Return "did you mean …?" where a known name is near, else all of them: "kinds: a, b"."""
    names = list(known)
    return did_you_mean(name, names) or f"{what}: {', '.join(names) or 'none'}"
