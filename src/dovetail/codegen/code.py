"""Plain Python as text: calls laid out as a formatter would, templates whose lines may be left out, and the file they make.

    self.v = nn.Linear(width, heads * head, bias=$bias)
    z = z * torch.sigmoid(self.gate(x))  #? gate            kept where the flag `gate` holds
    return z  #? not gate out                               kept where `gate` does not hold and `out` does

A class or function is defined once for all that need the same text; a second text under a name gets a number behind it.

Strings in templates and calls are code, written in this package alone. Everything else enters through two functions: a number
through `literal`, which refuses inf and nan (undefined names in Python), and a name given by a user through `in_docstring`.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.base.errors import SpecError

WIDTH = 100  # columns of an emitted line
STEP = 4  # columns of one level
BODY = 2 * STEP  # columns before a line of a method
MARK = re.compile(r"\s*#\? (?P<flags>.*)$")


def literal(value: Any) -> str:
    """Return a number, a boolean or None as Python source; raise SpecError for inf and nan, whose repr is an undefined name."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError("", f"{value} cannot be written as a number in Python", "use a finite number")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise TypeError(f"{type(value).__name__} is not a number: pass code as a string")
    return repr(value)


def in_docstring(text: str) -> str:
    """Return text escaped for a docstring in triple double quotes: Python reads back the same text, and no code."""
    return repr(text)[1:-1].replace('"', '\\"')


@dc.dataclass(frozen=True)
class Call:
    """A call in the emitted file. An argument is a number, an expression as text, or another call; without a name it is
    positional."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()
    open: bool = False  # one argument a line, however short they are

    @staticmethod
    def to(name: str, **args: Any) -> Call:
        """A call with named arguments; those that are None are left out."""
        return Call(name, tuple((key, value) for key, value in args.items() if value is not None))

    def opened(self) -> Call:
        """The same call, laid out with one argument a line."""
        return dc.replace(self, open=True)

    def change(self, **args: Any) -> Call:
        """The same call with other values for some of its arguments."""
        return dc.replace(self, args=tuple((key, args.get(key, value)) for key, value in self.args))

    def is_open(self) -> bool:
        """Whether it never fits on one line."""
        return self.open or any(isinstance(value, Call) and value.is_open() for _, value in self.args)

    def flat(self) -> str:
        """On one line."""
        return f"{self.name}({', '.join(_flat(key, value) for key, value in self.args)})"


def _flat(key: str, value: Any) -> str:
    text = value.flat() if isinstance(value, Call) else value if isinstance(value, str) else literal(value)
    return f"{key}={text}" if key else text


def wrapped(before: str, call: Call, after: str, indent: int) -> str:
    """`before call after` within the width: on one line, or its arguments on a line of their own, or each on its own. The first
    line is not indented, since it replaces a placeholder of a template."""
    one = f"{before}{call.flat()}{after}"
    if not call.is_open() and indent + len(one) <= WIDTH:
        return one
    inner, joined = indent + STEP, ", ".join(_flat(key, value) for key, value in call.args)
    if not call.is_open() and inner + len(joined) <= WIDTH:
        rows = [joined]
    else:
        rows = [_row(key, value, inner) for key, value in call.args]
    return "\n".join([f"{before}{call.name}(", *(" " * inner + row for row in rows), " " * indent + f"){after}"])


def _row(key: str, value: Any, indent: int) -> str:
    if isinstance(value, Call):
        return wrapped(f"{key}=" if key else "", value, ",", indent)
    return f"{_flat(key, value)},"


def signature(name: str, given: Iterable[str], gives: str = "", indent: int = STEP) -> str:
    """`def name(self, given…) -> gives:` within the width."""
    arguments = tuple(("", argument) for argument in ("self", *given))
    return wrapped("def ", Call(name, arguments), f" -> {gives}:" if gives else ":", indent)


def fill(text: str, flags: Mapping[str, object] | None = None, **placeholders: Any) -> str:
    """A template with its placeholders filled, and without the lines that are for flags that do not hold."""
    true = {name for name, value in (flags or {}).items() if value}
    kept: list[str] = []
    for line in text.strip("\n").split("\n"):
        mark = MARK.search(line)
        if mark is None:
            kept.append(line)
        elif _holds(mark["flags"].split(), true):
            kept.append(line[: mark.start()])
    source = "\n".join(kept)
    if not placeholders:
        return source
    # the longest first, as one name may begin another; in one pass, so that a `$` inside a value stays a `$`
    names = "|".join(re.escape(placeholder) for placeholder in sorted(placeholders, key=len, reverse=True))
    values = {placeholder: value if isinstance(value, str) else literal(value) for placeholder, value in placeholders.items()}
    return re.sub(rf"\$({names})", lambda match: values[match[1]], source)


def _holds(words: list[str], flags: set[str]) -> bool:
    """Whether every named flag is true, and none after a `not`."""
    wanted = True
    for before, word in itertools.pairwise(["", *words]):
        if word != "not":
            wanted = wanted and (word in flags) != (before == "not")
    return wanted


AT_LEAST_FP32 = '''
def $name(dtype: torch.dtype) -> torch.dtype:
    """The dtype for angles, softmax and sums over time: at least float32."""
    return torch.promote_types(dtype, torch.float32)
'''


class File:
    """What an emitted file defines, in order, and the letters its shapes are written with."""

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.letters: dict[str, str] = {}
        self.notes: list[str] = []

    def define(self, name: str, text: str, other: str = "") -> str:
        """Add a class or function whose text calls itself $name; the name it has in the file. Where another text has the name,
        it is called `other`, or gets a number."""
        for number in itertools.count():
            own = name if number == 0 else other if other and number == 1 else f"{other or name}{number + (not other)}"
            definition = text.replace("$name", own)
            if self.definitions.setdefault(own, definition) == definition:
                return own
        raise AssertionError("numbers never end")

    def define_at_least_fp32(self) -> None:
        """Add the function `at_least_fp32`, the dtype of computations that need at least float32."""
        self.define("at_least_fp32", fill(AT_LEAST_FP32))

    def letter(self, **letters: str) -> None:
        """The meaning of the letters in shapes."""
        self.letters |= letters

    def note(self, text: str) -> None:
        """Something a reader should know of the whole file."""
        if text not in self.notes:
            self.notes.append(text)
