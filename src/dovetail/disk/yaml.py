"""Read and write YAML safely and without torch, so that a syntax error is reported in the time it takes to start Python.

Plain scalars follow the core schema of YAML 1.2:

    null ~            None
    true false        booleans; `yes`, `no`, `on` and `off` are strings
    12 010 0o17 0x1f  whole numbers: 12, 10, 15, 31; `1:30`, `1_000` and dates are strings
    1.5 1e-5          numbers; `.inf`, `.nan` and what overflows (1e999) are refused, since no field of a spec may hold them

Size, depth and the number of items are bounded; aliases, tags and duplicate keys are errors with line and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dovetail.base.errors import SpecError
from dovetail.base.limits import SPEC_BYTES, SPEC_DEPTH, SPEC_DIGITS, SPEC_ITEMS
from dovetail.disk.untrusted import read_regular

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it is installed: the same events, much faster

NULL = re.compile(r"|~|null|Null|NULL")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_text(path: Path) -> str:
    """Return the text of a file of bounded size."""
    return read_regular(path, SPEC_BYTES, "a spec")


def parse_yaml(text: str, where: str) -> Any:
    """Return plain data from YAML text; `where` names the text in errors."""
    try:
        return _Reader(yaml.parse(text, Loader=LOADER), where).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = f"not YAML: {getattr(error, 'problem', error)}"
        raise SpecError(_at(where, mark), problem, "check quotes, colons and indentation") from error
    except UnicodeEncodeError as error:
        raise SpecError(where, f"not YAML: not valid Unicode ({error.reason})") from error


def dump_yaml(data: Any) -> str:
    """Return plain data as YAML, in the given order; short lists and mappings on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


class _Reader:
    """Builds plain data from the events of a parser, in one pass."""

    def __init__(self, events: Iterator[Any], where: str) -> None:
        self.events = events
        self.where = where
        self.items = 0

    def document(self) -> Any:
        """The one document of the text; None for an empty text."""
        data, documents = None, 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.refuse(event, "a second document begins here", "write one document")
                data = self.node(next(self.events), 0)
        return data

    def node(self, event: Any, depth: int) -> Any:
        """The data that begins with this event."""
        self.items += 1
        if self.items > SPEC_ITEMS:
            self.refuse(event, f"more than {SPEC_ITEMS:,} items", f"the limit is {SPEC_ITEMS:,}")
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, "YAML aliases are not read here", "write the part out")
        if event.tag is not None:
            self.refuse(event, f"YAML tags are not read here: {event.tag[:60]}", "remove the tag")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if depth == SPEC_DEPTH:
            self.refuse(event, "nested too deeply", f"the limit is {SPEC_DEPTH} levels")
        return self.mapping(depth) if isinstance(event, yaml.MappingStartEvent) else self.sequence(depth)

    def sequence(self, depth: int) -> list[Any]:
        """The items up to the end of the sequence."""
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return items

    def mapping(self, depth: int) -> dict[Any, Any]:
        """The keys and values up to the end of the mapping."""
        data: dict[Any, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
                self.refuse(event, "a key is a list or a mapping", "write a name")
            key = self.node(event, depth + 1)
            if key in data:
                self.refuse(event, f"the key {str(key)[:60]!r} is given twice", "remove one of them")
            data[key] = self.node(next(self.events), depth + 1)
        return data

    def scalar(self, event: Any) -> Any:
        """A plain scalar by the core schema; a quoted or block scalar is a string."""
        text: str = event.value
        if not event.implicit[0] or len(text) > 400:
            return text
        if NULL.fullmatch(text):
            return None
        if BOOL.fullmatch(text):
            return text.lower() == "true"
        if INT.fullmatch(text):
            if len(text.lstrip("+-0")) > SPEC_DIGITS:
                self.refuse(event, f"{text[:40]} has more than {SPEC_DIGITS} digits", f"the limit is {SPEC_DIGITS}")
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if NOT_FINITE.fullmatch(text) or FLOAT.fullmatch(text):
            self.refuse(event, f"{text[:40]} is not a finite number", "write a finite number")
        return text

    def refuse(self, event: Any, problem: str, remedy: str) -> NoReturn:
        raise SpecError(_at(self.where, event.start_mark), problem, remedy)


def _at(where: str, mark: Any) -> str:
    return where if mark is None else f"{where} line {mark.line + 1}, column {mark.column + 1}"


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or the core schema of 1.2 would read as something else."""


for _tag, _pattern in (("int", INT), ("float", FLOAT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern.pattern})$"), list("-+.0123456789"))
