"""Facts that the files of a model directory hold beside the spec: the dtype of the weights, and the trained context length."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dovetail.core.limits import CONFIG_BYTES
from dovetail.disk.model_files import CONFIG_FILE, INDEX_FILE, KEPT_CONFIG, WEIGHTS_FILE
from dovetail.disk.untrusted import Directory
from dovetail.hf.load import open_weights

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")  # of a config


class Context(NamedTuple):
    """The context length that a config states."""

    tokens: int
    field: str


def stored_dtype(directory: str | Path) -> torch.dtype | None:
    """Return the floating-point dtype of most values in the weight files; None where there are no weight files."""
    where = Directory(directory)
    if not where.has(WEIGHTS_FILE) and not where.has(INDEX_FILE):
        return None
    counts: Counter[torch.dtype] = Counter()
    with contextlib.ExitStack() as stack:
        for name, file in open_weights(where, stack).items():
            entry = file.entries[name]
            if entry.dtype.is_floating_point:
                counts[entry.dtype] += entry.size // entry.dtype.itemsize
    return counts.most_common(1)[0][0] if counts else None


def context_length(directory: str | Path) -> Context | None:
    """Return the context length of the directory's config, or of the config it was imported with."""
    where = Directory(directory)
    name = next((name for name in (CONFIG_FILE, KEPT_CONFIG) if where.has(name)), None)
    config: dict[str, Any] = {} if name is None else where.json(name, CONFIG_BYTES)
    for field in CONTEXT_FIELDS:
        value = config.get(field)
        if type(value) is int and value > 0:
            return Context(value, field)
    return None
