"""Dialect: what a family of models is called elsewhere, as one table of a page.

    spec      the family as plain data with one layer: all that its config cannot change
    fields    their config's fields <-> paths of our spec
    tensors   their tensors' names <-> ours, `{}` being the number of the layer

A spec can be written in a dialect if the config made from it, read back, gives the same spec: no second list of what is
allowed, and where something is lost the path at which the two part is the error.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dovetail.core.errors import SpecError
from dovetail.core.part import KINDS, Part
from dovetail.model import Model
from dovetail.port.convert import KEEP, Convert

Config = Mapping[str, Any]
Settings = dict[str, Any]  # path pattern of our spec -> plain data


class _Absent:
    """Stands for a path that a spec does not have."""


ABSENT = _Absent()


def look(spec: Part, pattern: str) -> Any:
    """What stands at the first place a pattern matches (`layers.*.mixer` looks into layer 0); ABSENT where there is none."""
    here: Any = spec
    for name in pattern.split("."):
        if isinstance(here, tuple):
            here = here[0] if here else ABSENT
        else:
            here = getattr(here, name) if isinstance(here, Part) and name in here.__dataclass_fields__ else ABSENT
    return here


class Field(Protocol):
    """Some of their config's fields, and what they say about our spec."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of their config that this one reads."""
        ...

    def give(self, spec: Model) -> dict[str, Any]:
        """What the spec says, in their words; nothing where they have no word for it."""
        ...

    def take(self, config: Config) -> Settings:
        """What the config says, in ours; nothing where it is silent."""
        ...


class Same:
    """A value that means the same there and here, at one or several of our paths."""

    def __init__(self, theirs: str, *ours: str) -> None:
        self.names, self.ours = (theirs,), ours

    def give(self, spec: Model) -> dict[str, Any]:
        value = look(spec, self.ours[0])
        return {} if value is ABSENT else {self.names[0]: value}

    def take(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        return {} if value is None else dict.fromkeys(self.ours, value)


class Named(Same):
    """A part that has another name there; several of their names may mean the same, the first is the one we write."""

    def __init__(self, theirs: str, ours: str, words: Mapping[str, str]) -> None:
        super().__init__(theirs, ours)
        self.words = words  # their word -> our kind

    def give(self, spec: Model) -> dict[str, Any]:
        part = look(spec, self.ours[0])
        words = [word for word, kind in self.words.items() if isinstance(part, Part) and type(part) is KINDS[kind]]
        return {self.names[0]: words[0]} if words else {}

    def take(self, config: Config) -> Settings:
        word = config.get(self.names[0])
        if word is None:
            return {}
        if not isinstance(word, str) or word not in self.words:
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is not known", f"known: {', '.join(self.words)}")
        return {self.ours[0]: self.words[word]}


class Switch(Same):
    """A field of theirs that chooses between two values of ours."""

    def __init__(self, theirs: str, ours: str, *, on: Any, off: Any) -> None:
        super().__init__(theirs, ours)
        self.values = {True: on, False: off}

    def give(self, spec: Model) -> dict[str, Any]:
        value = look(spec, self.ours[0])
        fitting = [chosen for chosen, ours in self.values.items() if ours == value]
        return {self.names[0]: fitting[0]} if fitting else {}

    def take(self, config: Config) -> Settings:
        chosen = config.get(self.names[0])
        if chosen is not None and not isinstance(chosen, bool):
            raise SpecError(f"config.{self.names[0]}", f"{chosen!r} is not true or false")
        return {} if chosen is None else {self.ours[0]: self.values[chosen]}


class Row:
    """Their tensor, ours that lie in it, and how."""

    def __init__(self, theirs: str, *ours: str, convert: Convert = KEEP) -> None:
        self.theirs, self.ours, self.convert = theirs, ours, convert


Limit = Callable[[Model], tuple[str, Any, str] | None]  # (path, value, what is asked) where they refuse what they can say


@dc.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One family; see the head of the file."""

    name: str  # their model_type
    architecture: str  # their class
    spec: Mapping[str, Any]
    layers: str  # their field that counts the layers
    fields: tuple[Field, ...]
    required: tuple[str, ...]  # fields without which a config says too little
    tensors: tuple[Row, ...]
    fixed: Mapping[str, Any] = dc.field(default_factory=dict)  # fields that can have one value only
    ignored: frozenset[str] = frozenset()  # fields that change nothing the model computes
    stale: tuple[str, ...] = ()  # patterns of tensors in old files that are no weights
    limits: tuple[Limit, ...] = ()


# their word -> our kind; where two words mean the same, the first is written
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}
# fields every config has that say nothing about what is computed
HOUSEKEEPING = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
