"""Fields that constrain the output: OpenAI's `response_format`, and what vLLM's clients send.

response_format       {"type": "text"} · {"type": "json_object"}
                      {"type": "json_schema", "json_schema": {"name": …, "schema": …}}
structured_outputs    one of json (a schema), regex, choice, grammar, json_object
guided_json, guided_regex, guided_choice, guided_grammar       the same, as older clients send them
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dovetail.base.limits import GRAMMAR_CHARACTERS, GRAMMAR_CHOICES
from dovetail.serving.http.base_schema import Body, Short
from dovetail.text.grammar import Grammar, given_grammars, json_grammar

Source = Annotated[str, Field(min_length=1, max_length=GRAMMAR_CHARACTERS)]
Schema = dict[str, Any] | bool | Source  # plain data, or JSON text
Choices = Annotated[list[Source], Field(min_length=1, max_length=GRAMMAR_CHOICES, fail_fast=True)]
OBJECT = {"type": "object"}


class TextFormat(Body):
    """Any text."""

    type: Literal["text"] = "text"

    def grammar(self) -> Grammar | None:
        """Return the grammar; None: all texts."""
        return None


class ObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]

    def grammar(self) -> Grammar | None:
        """Return the grammar."""
        return json_grammar(OBJECT)


class NamedSchema(Body):
    """A JSON schema with a name."""

    name: Short
    description: Annotated[str, Field(max_length=GRAMMAR_CHARACTERS)] | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None  # the schema is followed in any case


class SchemaFormat(Body):
    """A JSON value of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def grammar(self) -> Grammar | None:
        """Return the grammar."""
        return json_grammar(self.json_schema.schema_)


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ObjectFormat, Tag("json_object")]
    | Annotated[SchemaFormat, Tag("json_schema")],
    Discriminator(
        _type,
        custom_error_type="response_format",
        custom_error_message="its type is none of text, json_object and json_schema; give one of these",
    ),
]


class StructuredOutputs(Body):
    """vLLM's constraint: exactly one of its fields."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar_: Annotated[Source | None, Field(alias="grammar")] = None
    json_object: bool = False
    structural_tag: Any = None

    @field_validator("structural_tag")
    @classmethod
    def _no_tags(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not offered; give a json schema, a regex, a choice or a grammar")
        return None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.grammars()) != 1:
            raise ValueError("give one of json, regex, choice, grammar and json_object")
        return self

    def grammars(self) -> list[Grammar]:
        """Return the grammars that are given."""
        objects = given_grammars(OBJECT if self.json_object else None)
        return objects + given_grammars(self.json_, self.regex, self.choice, self.grammar_)


class Constrained(Body):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat = TextFormat()
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        if len(self._grammars()) > 1:
            raise ValueError(
                "response_format, structured_outputs and guided_*: the output has one constraint; give one of them"
            )
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The constraint; None: all texts."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[Grammar]:
        grammar = self.response_format.grammar()
        return [
            *([] if grammar is None else [grammar]),
            *([] if self.structured_outputs is None else self.structured_outputs.grammars()),
            *given_grammars(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
        ]
