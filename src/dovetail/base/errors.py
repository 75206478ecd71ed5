"""The errors Dovetail raises on purpose: each message says where, what is wrong and what to do. `exit_code` is the code with
which the command line ends. And what messages are made of: the known names nearest to a mistyped one, and strings from outside
made safe to print, since a server's answer or a tensor's name may hold terminal control sequences.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

DISTRIBUTION = "dovetail-lm"  # the name on the index; `dovetail` there is another project


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of these extras."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'


class DovetailError(Exception):
    """The base of every error below, whose exit code is 4 unless it says another; 1 is left to a law that fails and to two
    functions that differ."""

    exit_code = 4


class UsageError(DovetailError):
    """A command line or a call that cannot be understood: a flag that does not exist, a value outside its limits."""

    exit_code = 2


class SpecError(DovetailError):
    """A spec that cannot be built: `path` is the field, `problem` what is wrong with it, `remedy` what to do."""

    exit_code = 3

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        where = f"{path}: " if path else ""
        super().__init__(f"{where}{problem}" + (f" ({remedy})" if remedy else ""))


class InputError(DovetailError, ValueError):
    """Inputs that do not fit the model or their layout: a layout of another shape, a token id outside the vocabulary."""


class KeywordError(DovetailError, TypeError):
    """A call with a keyword that the function does not have."""

    exit_code = 2


class StateError(DovetailError):
    """A request that the decode state cannot serve: a full pool, a row out of range."""


class BackendError(DovetailError):
    """No attention kernel offers what the spec needs."""


class FileError(DovetailError):
    """A file that is missing, damaged or not what it claims to be."""


class ResourceError(DovetailError):
    """A computation that needs more memory than there is."""


class NonFiniteError(DovetailError):
    """A tensor holds NaN or infinity where a result needs finite numbers."""


class Diverged(DovetailError):
    """A training run whose loss or weights are not finite."""

    exit_code = 5


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


LINES = "\n\t"
PROSE = LINES + "\u200c\u200d"  # zero-width joiners: parts of emoji, Persian and Indic words; they move and hide nothing
UNPRINTABLE = ("C", "Zl", "Zp")  # control, format, surrogate, private and unassigned characters; line and paragraph separators


def printable(text: str, most: int | None = 300, keep: str = "") -> str:
    """At most `most` characters; each control or format character that is not in `keep` is shown as an escape like `\\x1b`."""
    cut = text if most is None else text[: most + 1]
    shown = "".join(c if c in keep or not unicodedata.category(c).startswith(UNPRINTABLE) else repr(c)[1:-1] for c in cut)
    return shown if most is None or len(text) <= most else f"{shown[:most]}…"
