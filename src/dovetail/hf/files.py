"""What the files of a model directory hold beside the spec: the dtype of the weights, the trained context length, the
tokenizer, and the generation settings: which ids begin and end text.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dovetail.base.errors import FileError
from dovetail.base.limits import CONFIG_BYTES
from dovetail.decoding.generation import Vocabulary
from dovetail.disk.model_files import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, KEPT_CONFIG, TOKENIZER_FILE, WEIGHTS_FILE
from dovetail.disk.untrusted import Directory
from dovetail.hf.classes import names_of_config, names_of_file
from dovetail.hf.load import open_weights
from dovetail.hf.write import files_beside, imported_config
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")  # of a config


class ContextLength(NamedTuple):
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


def context_length(directory: str | Path) -> ContextLength | None:
    """Return the context length of the directory's config, or of the config it was imported with."""
    where = Directory(directory)
    name = next((name for name in (CONFIG_FILE, KEPT_CONFIG) if where.has(name)), None)
    config: dict[str, Any] = {} if name is None else where.json(name, CONFIG_BYTES)
    for field in CONTEXT_FIELDS:
        value = config.get(field)
        if type(value) is int and value > 0:
            return ContextLength(value, field)
    return None


def read_vocabulary(where: Directory) -> Vocabulary:
    """Return the tokenizer, end-of-sequence tokens, first decoder tokens, chat template and names of classes of a directory, as
    far as it has them, and the files to write beside the weights when the model is saved."""
    config: dict[str, Any] = {}
    for name in (KEPT_CONFIG, CONFIG_FILE, GENERATION_FILE):  # a later file overrides an earlier one
        values = where.json(name) if where.has(name) else {}
        config |= {key: value for key, value in values.items() if value is not None}
    stop, start = _ids(config.get("eos_token_id")), _ids(config.get("decoder_start_token_id"))
    forced = _ids(config.get("forced_bos_token_id"))
    return Vocabulary(
        tokenizer=Tokenizer.load(where.place) if where.has(TOKENIZER_FILE) else None,
        stop=frozenset(stop),
        start=(*(start or _ids(config.get("bos_token_id"))), *forced),
        chat_template=_chat_template(where),
        classes=class_names(where),
        files=files_beside(where),
    )


def class_names(where: Directory) -> tuple[str, ...]:
    """The names of the classes of the head of a directory, as far as it has them."""
    return names_of_file(where) or names_of_config(imported_config(where))


def _chat_template(where: Directory) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(where.place)
    except FileError:  # a model without one; `chat=True` says so
        return None


def _ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of a config field: an id, a list of ids, or None."""
    return tuple(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
