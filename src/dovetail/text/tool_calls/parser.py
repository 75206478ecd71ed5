"""Tool calls in the text of a model, found while the text arrives.

split = parser.split('Sure.<tool_call>{"name": "f", "arguments": {}}</tool_call>', start=True, final=False)
split.content -> "Sure."      split.calls -> [ToolCall("f", "{}")]      split.rest -> ""     text that waits for more
"""

from __future__ import annotations

import dataclasses as dc
import importlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dovetail.base.errors import UsageError, names_or_nearest

ARGUMENTS = "arguments"


@dc.dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, and the arguments as JSON text."""

    name: str
    arguments: str


@dc.dataclass(frozen=True)
class Split:
    """Text that is content, calls that are complete, and text that waits for more."""

    content: str
    calls: list[ToolCall]
    rest: str = ""


class ToolParser(ABC):
    """One format of tool calls. A subclass in a file of this folder is registered under its name."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # a chat template that has all of them uses the format
    arguments: ClassVar[str] = ARGUMENTS  # the key of the arguments in a call

    @abstractmethod
    def split(self, text: str, *, start: bool, final: bool, tools: Collection[str]) -> Split:
        """Split text of an answer. `start`: no content came before it; `final`: no text follows; `tools`: the names of the
        tools. What looks like a call and is none, or calls a tool that is not offered, is content."""


def call_in(text: str, arguments: str, tools: Collection[str]) -> ToolCall | None:
    """The call that a JSON object describes, with its arguments under this key; None where it is none."""
    try:
        return call_of(json.loads(text), arguments, tools)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any, arguments: str, tools: Collection[str]) -> ToolCall | None:
    """The call of a JSON value; None where it is none."""
    if not isinstance(value, dict) or value.get("name") not in tools or not isinstance(value.get(arguments, {}), dict):
        return None
    return ToolCall(value["name"], json.dumps(value.get(arguments, {}), ensure_ascii=False))


@cache
def parsers() -> dict[str, ToolParser]:
    """The formats by name, in the order of their files."""
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        importlib.import_module(f"{__package__}.{module}")
    return {kind.name: kind() for kind in ToolParser.__subclasses__()}


def parser_named(name: str) -> ToolParser:
    """Return a format by its name; UsageError for an unknown one."""
    if name not in parsers():
        raise UsageError(
            f"--tool-parser: {name[:40]!r} is not a format of tool calls; {names_or_nearest(name, parsers(), 'formats')}"
        )
    return parsers()[name]


def parser_of(template: str) -> ToolParser | None:
    """Return the format that a chat template uses; None where it has the markers of none."""
    return next((parser for parser in parsers().values() if all(marker in template for marker in parser.markers)), None)


def held_back(text: str, marker: str) -> int:
    """The number of characters at the end of a text that may begin a marker, with the white space before them."""
    begins = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text) - len(text[: len(text) - begins].rstrip())
