"""Bodies of requests: OpenAI's fields, and those that vLLM's clients send. Every number, string and list has a bound.

A field that is null has its default. Unknown fields are ignored; fields that would change the answer and are not offered are
refused. Types are strict: "5" is no number. A list is read up to its first bad item: a bad body costs no more than a good one.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from dovetail.base.limits import (
    MAX_NEW_TOKENS,
    MAX_SEED,
    REQUEST_BIASES,
    REQUEST_LOGPROBS,
    REQUEST_N,
    REQUEST_PROMPTS,
    REQUEST_STOP_CHARACTERS,
    REQUEST_STOPS,
)
from dovetail.serving.http.base_schema import MAX_ID, Body, Id, Ids, Short, Text, first_is
from dovetail.serving.http.constraint_schema import Constrained

StopString = Annotated[str, Field(min_length=1, max_length=REQUEST_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(max_length=REQUEST_STOPS, fail_fast=True)]
Logprobs = Annotated[int, Field(ge=0, le=REQUEST_LOGPROBS)]
REFUSED = {
    "best_of": "is not offered; sample n choices instead",
    "suffix": "is not offered; the model continues a prompt",
    "chat_template": "templates of requests are not rendered; the server has that of the model",
    "documents": "are not offered; put them into a message",
    "functions": "are not offered; give tools in a chat",
}


Prompt = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Text], Field(min_length=1, max_length=REQUEST_PROMPTS, fail_fast=True), Tag("strings")]
    | Annotated[list[Ids], Field(min_length=1, max_length=REQUEST_PROMPTS, fail_fast=True), Tag("lists")],
    Discriminator(first_is({int: "ids", str: "strings"}, "lists")),
]
Stop = Annotated[
    Annotated[StopString, Tag("string")] | Annotated[StopStrings, Tag("strings")], Discriminator(first_is({}, "strings"))
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class GenerationBody(Constrained):
    """What completions and chat completions share."""

    model: Short | None = None
    n: Annotated[int, Field(ge=1, le=REQUEST_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_ID)] = -1  # −1 and 0: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[Short, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=REQUEST_BIASES)] = {}
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED - REQUEST_N)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=16 * REQUEST_STOPS, fail_fast=True)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] = 0
    prompt_logprobs: Logprobs | None = None
    skip_special_tokens: bool = True
    cache_salt: Short = ""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: Short | None = None
    best_of: Any = None
    suffix: Any = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None

    @field_validator(*REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        if value:  # "" and [] ask for nothing
            raise ValueError(REFUSED[info.field_name or ""])
        return None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_ID for key in value):
            raise ValueError("its keys are not token ids")
        return value

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] = 16
    echo: bool = False
    logprobs: Logprobs | None = None
    add_special_tokens: bool = True
    tools: Any = None

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value:
            raise ValueError("are for chats; use /v1/chat/completions")
        return None

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 is for echo or prompt_logprobs; give 1 or more")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("stream: log-probs of a prompt (echo with logprobs) are not streamed; request the whole answer")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return self.prompt if self.prompt and not isinstance(self.prompt[0], int) else [self.prompt]  # type: ignore[return-value]
