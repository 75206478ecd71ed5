"""Text to ids and back by a tokenizer.json, whatever kind of tokenizer it describes; the engine is Hugging Face's own.

A text that is learned from is read as it stands: what looks like a special token in it is plain text, and none is added. A
prompt is read as the reference reads it: with the special tokens that its author wrote, and those the tokenizer adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.io.untrusted import Directory
from dovetail.text.cut import cuts_are_exact, pieces

TOKENIZER_FILE = "tokenizer.json"
END, MASK = "<|end|>", "<|mask|>"  # ids 0 and 1 of those trained here: the end of a text, and the mask of masked training
LARGEST_FILE = 64 * 2**20  # bytes of a tokenizer.json: the largest known vocabularies stay below
PIECE = 1 << 16  # characters encoded as one where the text can be cut
AT_ONCE = 16  # pieces encoded together


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
        """Return the ids (n,) of plain text: special tokens are neither added nor recognized in it.

        The ids are those of the whole text, whatever its length. The engine needs 130 to 300 bytes of memory per character that
        it encodes at once: PIECE · AT_ONCE characters, so at most 0.3 GB, where `cuts_are_exact`; the whole text where not.
        """
        cut = len(text) > PIECE and cuts_are_exact(self.engine)
        parts = pieces(text, PIECE) if cut else iter([text])
        ids = [torch.zeros(0, dtype=torch.long)]
        while some := list(itertools.islice(parts, AT_ONCE)):
            for encoding in self.engine.encode_batch_fast(some, add_special_tokens=False):
                ids.append(torch.tensor(encoding.ids, dtype=torch.long))
        return torch.cat(ids)

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
