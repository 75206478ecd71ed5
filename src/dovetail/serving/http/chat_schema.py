"""Bodies of conversations: messages of text, and what the chat template is given beside them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dovetail.core.limits import CHAT_MESSAGES, MAX_NEW_TOKENS
from dovetail.serving.http.schema import NO_TOOLS, Body, GenerationBody, Ids, Logprobs, Short, Text, first_is

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
    """A message of a conversation; the chat template sees its role, content and name."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[Part], Field(max_length=CHAT_MESSAGES, fail_fast=True), Tag("parts")],
        Discriminator(first_is({}, "parts")),
    ]
    name: Short | None = None
    tool_calls: Any = None

    @field_validator("tool_calls")
    @classmethod
    def _no_calls(cls, value: Any) -> Any:
        if value:
            raise ValueError(NO_TOOLS)
        return None

    def plain(self) -> dict[str, str]:
        """Return the message as a template sees it; the texts of parts are joined by line ends."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class ChatFields(Body):
    """A conversation, and how it is rendered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=CHAT_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[Short, bool | int | float | Short], Field(max_length=64)] = {}

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
    tool_choice: Any = None

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
