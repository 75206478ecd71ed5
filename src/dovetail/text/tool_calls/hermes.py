"""Hermes' format, which Qwen uses, too: JSON objects between tags, behind optional content.

<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection

from dovetail.text.tool_calls.parser import Split, ToolCall, ToolParser, call_in, held_back

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """Tags around JSON objects."""

    name = "hermes"
    markers = (BEGIN, END)

    def split(self, text: str, *, start: bool, final: bool, tools: Collection[str]) -> Split:
        content, calls = "", list[ToolCall]()
        while (begin := text.find(BEGIN)) >= 0:
            end = text.find(END, begin)
            if end < 0:
                break
            call = call_in(text[begin + len(BEGIN) : end], self.arguments, tools)
            if call is None:
                content += text[: end + len(END)]
            else:
                content += text[:begin].rstrip()
                calls.append(call)
            text = text[end + len(END) :]
        if final:
            return Split(content + (text.rstrip() if calls else text), calls)
        kept = len(text) - len(text[:begin].rstrip()) if begin >= 0 else held_back(text, BEGIN)
        return Split(content + text[: len(text) - kept], calls, text[len(text) - kept :])
