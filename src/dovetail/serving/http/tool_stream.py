"""Tool calls of one choice: text that arrives becomes content and calls."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any, Protocol

from dovetail.serving.http.chat_schema import ChatBody
from dovetail.serving.http.errors import ApiError
from dovetail.text.tool_calls.parser import ARGUMENTS, Split, ToolParser, call_in


class Splits(Protocol):
    """Finds calls in text."""

    def split(self, text: str, *, start: bool, final: bool, tools: Collection[str]) -> Split:
        """Split text into content, calls, and what waits for more."""
        ...


class WholeCall:
    """A text that its grammar makes one call: known at the end. One that was cut off is content."""

    def __init__(self, arguments: str) -> None:
        """`arguments`: the key of the arguments."""
        self.arguments = arguments

    def split(self, text: str, *, start: bool, final: bool, tools: Collection[str]) -> Split:
        call = call_in(text, self.arguments, tools) if final else None
        if not final:
            return Split("", [], text)
        return Split(text, []) if call is None else Split("", [call])


class ToolCalls:
    """How the calls of a conversation are asked for and found."""

    def __init__(self, body: ChatBody, parser: ToolParser | None) -> None:
        """`parser`: the format of the model; None where none is known. Raises ApiError where the choice needs one."""
        choice, key = body.choice, ARGUMENTS if parser is None else parser.arguments
        self.names = [one.function.name for one in body.tools] if choice.parsed else []
        self.grammar = choice.grammar(body.tools, key)
        self.most, self.finish = None if body.parallel_tool_calls else 1, choice.finish
        if self.grammar is not None and body.grammar is not None:
            raise ApiError(400, "tool_choice: constrains the output, and so does another field; give one", param="tool_choice")
        self.splits = parser if self.grammar is None else WholeCall(key)
        if self.names and self.splits is None:
            remedy = "set tool_choice to required or to a tool, or start the server with --tool-parser"
            problem = "the format in which this model writes calls is not known, so tool_choice auto cannot find them"
            message = f"tools: {problem}; {remedy}"
            raise ApiError(400, message, param="tools")

    def stream(self) -> ToolStream | None:
        """Return a stream of one choice; None where no call is looked for."""
        return ToolStream(self.splits, self.names, self.most, self.finish) if self.names and self.splits is not None else None


class ToolStream:
    """push(text, final) -> the content and calls that are final now."""

    def __init__(self, splits: Splits, tools: Collection[str], most: int | None, finish: str) -> None:
        """`tools`: the names of the tools; at most `most` calls; `finish`: why an answer with calls ended."""
        self.splits, self.tools, self.most, self.finish = splits, frozenset(tools), most, finish
        self.rest, self.started, self.count = "", False, 0

    def push(self, text: str, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return content and calls in OpenAI's form."""
        split = self.splits.split(self.rest + text, start=not self.started, final=final, tools=self.tools)
        self.rest = split.rest
        self.started = self.started or bool(split.content)
        calls = list[dict[str, Any]]()
        for call in split.calls:
            if self.most is None or self.count < self.most:
                function = {"name": call.name, "arguments": call.arguments}
                calls.append(
                    {"index": self.count, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                )
                self.count += 1
        return split.content, calls

    def reason(self, finish: str | None) -> str | None:
        """Why the choice ended: with a complete call, for its sake."""
        return self.finish if self.count and finish == "stop" else finish
