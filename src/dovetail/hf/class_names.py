"""The names of the classes of a head, in their order: of a directory of ours, and of a Hugging Face config.

    class_names.json    ["B-PER", "I-PER", "O"]                      written by a training run
    config.json         id2label: {"0": "B-PER", "1": "I-PER", …}    where there is no such file

LABEL_0, LABEL_1 … are no names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.errors import FileError
from dovetail.core.limits import CARRIED_BYTES, CONFIG_CLASSES
from dovetail.disk.model_files import CLASSES_FILE
from dovetail.disk.shape import check_shape
from dovetail.disk.untrusted import Directory

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
