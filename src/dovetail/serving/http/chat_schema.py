"""Bodies of conversations: messages of text, and what the chat template is given beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dovetail.base.errors import names_or_nearest
from dovetail.base.limits import CHAT_MESSAGES, MAX_NEW_TOKENS, REQUEST_TOOLS
from dovetail.serving.http.base_schema import Body, Ids, Name, Short, Text, first_is
from dovetail.serving.http.schema import GenerationBody, Logprobs
from dovetail.serving.http.tool_schema import CHOICES, NO_TOOL, Called, Choice, NamedTool, Tool, ToolChoice, Tools

RESERVED = {"messages", "add_generation_prompt", "tools", "documents", "self", "requests", "prompt"}


class Part(Body):
    """A part of a message's content."""

    type: Short
    text: Text = ""

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError("only parts of the type text are offered")
        return value


class Message(Body):
    """A message of a conversation; the chat template sees its role, content and name, and its tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[Part], Field(max_length=CHAT_MESSAGES, fail_fast=True), Tag("parts")],
        Discriminator(first_is({}, "parts")),
    ] = ""
    name: Name | None = None
    tool_calls: Annotated[list[Called], Field(max_length=REQUEST_TOOLS, fail_fast=True)] = []
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: is missing; a message without tool_calls needs it")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as a template sees it; the texts of parts are joined by line ends."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        calls = {"tool_calls": [one.plain() for one in self.tool_calls]} if self.tool_calls else {}
        named = {key: value for key, value in given.items() if value is not None}
        return {"role": self.role, "content": text, **named, **calls}


class ChatFields(Body):
    """A conversation, and how it is rendered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=CHAT_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[Short, bool | int | float | Short], Field(max_length=64)] = {}
    tools: Tools = []

    @property
    def offered(self) -> list[Tool]:
        """The tools that the chat template renders."""
        return self.tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := RESERVED & set(value):
            raise ValueError(f"{min(taken)} is set by the server")
        return value

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("continue_final_message: excludes add_generation_prompt; give one of them")
        return self


class ChatBody(GenerationBody, ChatFields):
    """`POST /v1/chat/completions`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True

    @property
    def choice(self) -> ToolChoice:
        """Which of the tools the model may or must call."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice
        return CHOICES[self.tool_choice or "auto"] if self.tools else NO_TOOL

    @property
    def offered(self) -> list[Tool]:
        """The tools that the chat template renders."""
        return self.choice.offered(self.tools)

    @model_validator(mode="after")
    def _known_tool(self) -> Self:
        names = [one.function.name for one in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have one name; rename one")
        if isinstance(self.tool_choice, NamedTool) and (name := self.tool_choice.function.name) not in names:
            raise ValueError(f"tool_choice: {name!r} is no tool; {names_or_nearest(name, names, 'tools')}")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required needs tools; give them")
        return self

    @model_validator(mode="after")
    def _logprobs_first(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self


class TokenizeBody(ChatFields):
    """`POST /tokenize`: a string, or a conversation."""

    model: Short | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(max_length=CHAT_MESSAGES, fail_fast=True)] = []
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give either it or messages")
        return self

    @property
    def special(self) -> bool:
        """Whether the tokenizer adds special tokens: by default to a string, not to a conversation."""
        return self.add_special_tokens if "add_special_tokens" in self.model_fields_set else self.prompt is not None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Short | None = None
    tokens: Ids
