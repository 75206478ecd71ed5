"""Llama 3's format: an answer that is nothing but JSON objects, separated by `;`, behind an optional tag.

{"name": "weather", "parameters": {"city": "Bern"}}
"""

from __future__ import annotations

import json
from collections.abc import Collection

from dovetail.text.tool_calls.parser import Split, ToolCall, ToolParser, call_of

TAG = "<|python_tag|>"
OPENING = "{"


class Llama3Calls(ToolParser):
    """An answer of JSON objects."""

    name = "llama3"
    markers = ("<|start_header_id|>", '"parameters": ')
    arguments = "parameters"

    def split(self, text: str, *, start: bool, final: bool, tools: Collection[str]) -> Split:
        given = text.strip()
        possible = start and (given.startswith((OPENING, TAG)) or TAG.startswith(given))
        if not possible:
            return Split(text, [])
        if not final:
            return Split("", [], text)
        calls = self._calls(given.removeprefix(TAG), tools)
        return Split("", calls) if calls else Split(text, [])

    def _calls(self, text: str, tools: Collection[str]) -> list[ToolCall]:
        """The calls of a whole answer; none where one of its objects is no call."""
        calls, decoder = list[ToolCall](), json.JSONDecoder()
        while text := text.lstrip(" \n\t;"):
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = call_of(value, self.arguments, tools)
            if call is None:
                return []
            calls.append(call)
            text = text[end:]
        return calls
