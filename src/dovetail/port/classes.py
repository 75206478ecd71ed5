"""Classifiers in their words: `id2label` names the classes, and how many there are is how many names it has.

id2label: {"0": "NEGATIVE", "1": "POSITIVE"}      <->      head.classes: 2

A spec holds no names: what is written is LABEL_0, LABEL_1, …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.table import Config, Same, Settings, look

MAX_CLASSES = 100_000  # a config has a name for each


class Classes:
    """How many classes a head has; as many as the family usually has where a config does not say."""

    names = ("id2label", "label2id", "num_labels")

    def __init__(self, usual: int = 2) -> None:
        self.usual = usual

    def give(self, spec: Model) -> dict[str, Any]:
        count = look(spec, "head.classes")
        if not isinstance(count, int) or count > MAX_CLASSES:
            return {}
        labels = [f"LABEL_{i}" for i in range(count)]
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}

    def take(self, config: Config) -> Settings:
        labels, count = config.get("id2label"), config.get("num_labels")
        if labels is not None and not isinstance(labels, Mapping):
            raise SpecError("config.id2label", f"{labels!r} is not a mapping")
        if labels is None and isinstance(count, int) and count > MAX_CLASSES:
            raise SpecError("config.num_labels", f"{count} is more than {MAX_CLASSES:,}, the largest number of classes")
        return {"head.classes": len(labels) if labels is not None else self.usual if count is None else count}


class Otherwise(Same):
    """A value that, where it is null or left out, is that of another of their fields."""

    def __init__(self, theirs: str, other: str, *ours: str) -> None:
        super().__init__(theirs, *ours)
        self.other = other

    def take(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        value = config.get(self.other) if value is None else value
        return {} if value is None else dict.fromkeys(self.ours, value)


class Pooling(Same):
    """Which vector of a row is classified."""

    WORDS = {"cls": "first", "mean": "mean"}

    def give(self, spec: Model) -> dict[str, Any]:
        words = [word for word, how in self.WORDS.items() if how == look(spec, self.ours[0])]
        return {self.names[0]: words[0]} if words else {}

    def take(self, config: Config) -> Settings:
        word = config.get(self.names[0], "cls")
        if word not in tuple(self.WORDS):
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is not known", f"known: {', '.join(self.WORDS)}")
        return {self.ours[0]: self.WORDS[word]}
