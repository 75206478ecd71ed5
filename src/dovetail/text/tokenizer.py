"""Text to ids and back by a tokenizer.json, whatever kind of tokenizer it describes; the engine is Hugging Face's own.

A text that is learned from is read as it stands: what looks like a special token in it is plain text, and none is added. A
prompt is read as the reference reads it: with the special tokens that its author wrote, and those the tokenizer adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.io.untrusted import Directory

TOKENIZER_FILE = "tokenizer.json"
END, MASK = "<|end|>", "<|mask|>"  # ids 0 and 1 of those trained here: the end of a text, and the mask of masked training
LARGEST_FILE = 64 * 2**20  # bytes of a tokenizer.json: the largest known vocabularies stay below
PIECE = 1 << 16  # characters trained on or encoded as one, cut at the end of a line
AT_ONCE = 32  # pieces encoded together: what the engine notes of each token is many times the text


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engine.encode_special_tokens = True  # a text that speaks of <|end|> does not end there

    @staticmethod
    def load(directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory."""
        where = Directory(directory)
        path, text = where.place / TOKENIZER_FILE, where.text(TOKENIZER_FILE, LARGEST_FILE)
        try:
            engine = Engine.from_str(text)
            engine.no_padding()  # a file may ask for rows of one length: that is for who makes a batch
            engine.no_truncation()
            return Tokenizer(engine)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the engine raises bare Exception for a file it cannot read, or panics
            raise FileError(f"{path}: cannot be read as a tokenizer ({str(error)[:300]})") from error

    def to_json(self) -> str:
        """What tokenizer.json holds."""
        return self.engine.to_str(pretty=True)

    @property
    def size(self) -> int:
        """How many ids there are."""
        return self.engine.get_vocab_size(with_added_tokens=True)

    def id_of(self, token: str) -> int:
        """The id of one token as it is written in the vocabulary."""
        found = self.engine.token_to_id(token)
        if found is None:
            raise FileError(f"{TOKENIZER_FILE}: has no token {token!r}")
        return found

    def encode(self, text: str) -> Tensor:
        """(n,) ids of a text; what looks like a special token in it is read as plain text."""
        found = [torch.zeros(0, dtype=torch.long)]
        pieces = iter(pieces_of(text))
        while some := list(itertools.islice(pieces, AT_ONCE)):
            for piece in self.engine.encode_batch_fast(some, add_special_tokens=False):
                found.append(torch.tensor(piece.ids, dtype=torch.long))
        return torch.cat(found)

    def prompt(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a prompt as the reference reads it; `add_special` where no template has written the special tokens."""
        self.engine.encode_special_tokens = False
        try:
            return self.engine.encode(text, add_special_tokens=add_special).ids
        finally:
            self.engine.encode_special_tokens = True

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids; special tokens are left out, bytes that form no character become �."""
        return self.engine.decode(ids.tolist() if isinstance(ids, Tensor) else list(ids), skip_special_tokens=True)

    def label(self, token: int) -> str:
        """One token as a reader wants to see it: a space as ·, the end of a line as ↵, what cannot be shown by its code."""
        shown = self.engine.decode([token], skip_special_tokens=False)
        shown = shown.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
        return shown if shown.isprintable() else shown.encode("unicode_escape").decode()


def pieces_of(text: str) -> Iterable[str]:
    """The text in pieces of about PIECE characters, cut behind a line's end where there is one."""
    start = 0
    while start < len(text):
        stop = min(start + PIECE, len(text))
        line = text.rfind("\n", start, stop) + 1
        stop = line if stop < len(text) and line > start else stop
        yield text[start:stop]
        start = stop
