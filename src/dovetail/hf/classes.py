"""Classifiers: `id2label` names the classes, so its length is their number.

id2label: {"0": "NEGATIVE", "1": "POSITIVE"}      <->      head.classes: 2

A spec holds no names of classes: LABEL_0, LABEL_1 … are written, or those of a directory (hf/class_names.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.core.limits import CONFIG_CLASSES
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.table import Form, Row
from dovetail.model import Model


def classified(family: str, task: str, under: str, head: Any, tensors: tuple[Row, ...], fields: tuple[Field, ...]) -> Form:
    """The model class of a family that classifies a Sequence, a Token or an Image; `under` is the prefix of its names."""
    return Form(
        architecture=f"{family}For{task}Classification",
        auto=f"AutoModelFor{task}Classification",
        head={"head": head},
        prefix=under,
        tensors=tensors,
        fields=fields,
    )


class Classes(Field):
    """The number of classes of a head; the family's default where the config has none."""

    names = ("id2label", "label2id", "num_labels")

    def __init__(self, default: int = 2) -> None:
        self.default = default

    def to_hf(self, spec: Model) -> dict[str, Any]:
        count = value_at(spec, "head.classes")
        if not isinstance(count, int) or count > CONFIG_CLASSES:
            return {}
        labels = [f"LABEL_{i}" for i in range(count)]
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}

    def from_hf(self, config: Config) -> Settings:
        labels, count = config.get("id2label"), config.get("num_labels")
        if labels is not None and not isinstance(labels, Mapping):
            raise SpecError("config.id2label", f"{labels!r} is not a mapping")
        if labels is None and isinstance(count, int) and count > CONFIG_CLASSES:
            raise SpecError("config.num_labels", f"{count} is more than {CONFIG_CLASSES:,}, the largest number of classes")
        return {"head.classes": len(labels) if labels is not None else self.default if count is None else count}


class Fallback(Copy):
    """A value that, null or left out, is that of another config field."""

    def __init__(self, name: str, other: str, *paths: str) -> None:
        super().__init__(name, *paths)
        self.other = other

    def from_hf(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        value = config.get(self.other) if value is None else value
        return {} if value is None else dict.fromkeys(self.paths, value)


class Pooling(Copy):
    """Which vector of a sequence is classified."""

    POOLINGS = {"cls": "first", "mean": "mean"}

    def to_hf(self, spec: Model) -> dict[str, Any]:
        words = [word for word, pooling in self.POOLINGS.items() if pooling == value_at(spec, self.paths[0])]
        return {self.names[0]: words[0]} if words else {}

    def from_hf(self, config: Config) -> Settings:
        word = config.get(self.names[0], "cls")
        if word not in tuple(self.POOLINGS):
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is unsupported", f"supported: {', '.join(self.POOLINGS)}")
        return {self.paths[0]: self.POOLINGS[word]}
