"""The tokenizer and generation settings of a model directory: what turns text into ids, and which ids begin and end text."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import FileError
from dovetail.decoding.generation import Vocabulary
from dovetail.disk.model_files import CONFIG_FILE, GENERATION_FILE, KEPT_CONFIG, TOKENIZER_FILE
from dovetail.disk.untrusted import Directory
from dovetail.hf.class_names import names_of_config, names_of_file
from dovetail.hf.write import files_beside, imported_config
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer


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
