"""What all bodies of requests share: bounded strings and lists of ids, and how null and unknown fields are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from dovetail.base.limits import PROMPT_CHARACTERS, REQUEST_ITEMS

MAX_ID = 2**31 - 1
Text = Annotated[str, Field(max_length=PROMPT_CHARACTERS)]
Short = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(max_length=256, pattern=r"^[^\s<>|\\/]*$")]  # a template writes it where a role stands
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Ids = Annotated[list[Id], Field(max_length=REQUEST_ITEMS, fail_fast=True)]


def first_is(names: dict[type, str], other: str) -> Callable[[Any], str]:
    """Return a function that names the form of a union by the type of the value, or of its first item."""

    def form(value: Any) -> str:
        if not isinstance(value, list):
            return "string"
        return next((name for type_, name in names.items() if value and isinstance(value[0], type_)), other)

    return form


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="wrap")
    @classmethod
    def _null_is_default(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if value is not None:
            return handler(value)
        field = cls.model_fields[info.field_name or ""]
        return handler(value) if field.is_required() else field.get_default(call_default_factory=True)
