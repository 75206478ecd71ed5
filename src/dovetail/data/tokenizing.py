"""The tokenizer of a corpus, and the token after each document."""

from __future__ import annotations

from pathlib import Path

from dovetail.base.errors import FileError, UsageError
from dovetail.base.limits import JSON_BYTES, TOKENIZER_BYTES
from dovetail.data.plan import BYTES
from dovetail.disk.model_files import TOKENIZER_FILE
from dovetail.disk.untrusted import Directory, exists, is_directory
from dovetail.text.chat import CONFIG_FILE, special_token
from dovetail.text.learn import LEAST, learn
from dovetail.text.tokenizer import END, Tokenizer


def read_tokenizer(given: str | Path | Tokenizer) -> tuple[str, Tokenizer]:
    """Return the content of tokenizer.json, and the tokenizer."""
    if isinstance(given, Tokenizer):
        return given.to_json(), given
    path = Path(given)
    if is_directory(path):
        return Directory(path).text(TOKENIZER_FILE, TOKENIZER_BYTES), Tokenizer.load(path)
    if exists(path):
        if path.name != TOKENIZER_FILE:
            raise FileError(f"{path}: is not called {TOKENIZER_FILE}; give the directory that holds one")
        return read_tokenizer(path.parent)
    if given != BYTES:
        raise FileError(f"{given}: no such tokenizer; give a directory with a {TOKENIZER_FILE}, or {BYTES!r}")
    learned = learn("", LEAST)
    return learned.to_json(), learned


def end_token(tokenizer: Tokenizer, given: str | Path | Tokenizer, end: str | None) -> int | None:
    """Return the id after each document."""
    if end is not None:
        return tokenizer.id_of(end) if end else None
    if (token := tokenizer.engine.token_to_id(END)) is not None:
        return token
    declared = None
    if not isinstance(given, Tokenizer):
        place = Path(given)
        where = Directory(place if is_directory(place) else place.parent)
        declared = where.json(CONFIG_FILE, JSON_BYTES).get("eos_token") if where.has(CONFIG_FILE) else None
    if (content := special_token(declared)) is None:
        raise UsageError(f"--end: {CONFIG_FILE} has no eos_token; name the token after each document, or '' for none")
    return tokenizer.id_of(content)
