"""Tools of a conversation: their schemas, which of them the model may or must call, and calls in the history."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from dovetail.base.limits import GRAMMAR_CHARACTERS, REQUEST_TOOLS
from dovetail.serving.http.base_schema import Body, Name, Text
from dovetail.text.grammar import Grammar, json_grammar

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Field(max_length=GRAMMAR_CHARACTERS)] = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool as a chat template sees it."""
        return {"type": "function", "function": self.function.model_dump(include={"name", "description", "parameters"})}


def schema_of_calls(tools: list[Tool], arguments: str) -> dict[str, Any]:
    """Return the schema of a call of one of the tools, whose arguments have this key. The parameters of each tool are a
    definition, so that references inside them lead to themselves."""
    calls, definitions = list[dict[str, Any]](), dict[str, Any]()
    for number, tool in enumerate(tools):
        place = f"tool_{number}"
        definitions[place] = _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/{place}")
        fields = {"name": {"const": tool.function.name}, arguments: {"$ref": f"#/$defs/{place}"}}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions}


def _moved(value: Any, place: str) -> Any:
    """A schema whose local references lead to where it stands in another."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(one, place) for key, one in value.items()}
    target = value.get("$ref")
    return {**moved, "$ref": place + target[1:]} if isinstance(target, str) and target.startswith("#") else moved


Tools = Annotated[list[Tool], Field(max_length=REQUEST_TOOLS, fail_fast=True)]


class ToolChoice(Body):
    """Which tools the model may call: by default those that it chooses, as its format writes them."""

    parsed: ClassVar[bool] = True  # whether calls are looked for in the text
    finish: ClassVar[str] = "tool_calls"  # why an answer with calls ended

    def offered(self, tools: list[Tool]) -> list[Tool]:
        """Return the tools that the chat template renders."""
        return tools

    def grammar(self, tools: list[Tool], arguments: str) -> Grammar | None:
        """Return the constraint on the text; None: the model may answer without a call."""
        return None


class NoTool(ToolChoice):
    """No tool is shown, and none is called."""

    parsed: ClassVar[bool] = False

    def offered(self, tools: list[Tool]) -> list[Tool]:
        return []


class AnyTool(ToolChoice):
    """One of the tools must be called."""

    def grammar(self, tools: list[Tool], arguments: str) -> Grammar | None:
        return json_grammar(schema_of_calls(tools, arguments))


class FunctionName(Body):
    """The name of a function."""

    name: ToolName


class NamedTool(ToolChoice):
    """This tool must be called."""

    finish: ClassVar[str] = "stop"
    type: Literal["function"]
    function: FunctionName

    def grammar(self, tools: list[Tool], arguments: str) -> Grammar | None:
        return json_grammar(schema_of_calls([one for one in tools if one.function.name == self.function.name], arguments))


NO_TOOL = NoTool()
CHOICES = {"none": NO_TOOL, "auto": ToolChoice(), "required": AnyTool()}
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("name")] | Annotated[NamedTool, Tag("tool")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "tool"),
]


class CalledFunction(Body):
    """A call in the history."""

    name: ToolName
    arguments: Text = "{}"

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            pass
        raise ValueError("is not a JSON object as text")


class Called(Body):
    """A tool call of a message in the history."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call as a chat template sees it: with its arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}
