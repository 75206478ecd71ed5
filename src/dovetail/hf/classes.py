"""Classifiers: `id2label` names the classes, so its length is their number.

id2label: {"0": "NEGATIVE", "1": "POSITIVE"}      <->      head.classes: 2

A spec holds no names of classes: LABEL_0, LABEL_1 … are written, or those of a directory, in
their order: of a directory of ours, or of a Hugging Face config.

    class_names.json    ["B-PER", "I-PER", "O"]                      written by a training run
    config.json         id2label: {"0": "B-PER", "1": "I-PER", …}    where there is no such file

LABEL_0, LABEL_1 … are no names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.base.errors import FileError, SpecError
from dovetail.base.limits import CARRIED_BYTES, CONFIG_CLASSES
from dovetail.disk.model_files import CLASSES_FILE
from dovetail.disk.shape import check_shape
from dovetail.disk.untrusted import Directory
from dovetail.hf.field import Config, Copy, Field, Settings, value_at
from dovetail.hf.table import Form, Row
from dovetail.model.model import Model


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


LABELS = "id2label"


def names_of_file(where: Directory) -> tuple[str, ...]:
    """The names in class_names.json; none where there is no such file."""
    if not where.has(CLASSES_FILE):
        return ()
    path, text = where.place / CLASSES_FILE, where.text(CLASSES_FILE, CARRIED_BYTES)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is not JSON ({str(error)[:120]})") from error
    check_shape(names, [str], str(path))
    if len(names) > CONFIG_CLASSES:
        raise FileError(f"{path}: has {len(names):,} names; the limit is {CONFIG_CLASSES:,}")
    return tuple(names)


def names_of_config(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in the config of a family; none where they are LABEL_0, LABEL_1 …, or no names of the classes 0, 1 …"""
    labels = config.get(LABELS)
    if not isinstance(labels, Mapping) or len(labels) > CONFIG_CLASSES:
        return ()
    by_number = {str(number): name for number, name in labels.items()}
    names = [by_number.get(str(i)) for i in range(len(labels))]
    known = tuple(name for name in names if isinstance(name, str))
    return known if known != tuple(f"LABEL_{i}" for i in range(len(labels))) and len(known) == len(names) else ()


def with_names(config: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The config with these names, where it has names of as many classes."""
    if not names or len(config.get(LABELS) or ()) != len(names):
        return config
    return {**config, LABELS: dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
