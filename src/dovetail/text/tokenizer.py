"""A byte-level BPE tokenizer: trained on a text, kept as tokenizer.json.

Every byte is a token to begin with, so any text can be written and nothing is unknown; pairs that occur often are merged until
the vocabulary is full. Ids 0 and 1 are special: the end of a text, and the mask of masked-token training.
                                                                          Sennrich et al. 2016; Radford et al. 2019 (bytes)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from dovetail.core.errors import FileError, SpecError

TOKENIZER_FILE = "tokenizer.json"
END, MASK = "<|end|>", "<|mask|>"
SPECIAL = (END, MASK)
LEAST = 256 + len(SPECIAL)  # the bytes and the special tokens
LARGEST_FILE = 64 * 2**20  # bytes of a tokenizer.json: the largest known vocabularies stay below
PIECE = 1 << 16  # characters trained on or encoded as one, cut at the end of a line
AT_ONCE = 32  # pieces encoded together: what the engine notes of each token is many times the text


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engine.encode_special_tokens = True  # a text that speaks of <|end|> does not end there

    @staticmethod
    def train(text: str, vocab: int) -> Tokenizer:
        """A tokenizer of at most `vocab` tokens (fewer where the text has no more pairs) from a text."""
        if vocab < LEAST:
            raise SpecError(
                "vocab", f"{vocab} is too small: bytes and special tokens alone are {LEAST}", f"--set vocab={LEAST}"
            )
        engine = Engine(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        )
        engine.train_from_iterator(_pieces(text), trainer)
        return Tokenizer(engine)

    @staticmethod
    def load(directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory."""
        path = Path(directory) / TOKENIZER_FILE
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise FileError(f"{path}: is larger than {LARGEST_FILE} bytes; that is no tokenizer")
            return Tokenizer(Engine.from_str(path.read_text(encoding="utf-8")))
        except FileError:
            raise
        except Exception as error:  # the engine raises bare Exception for a file it cannot read
            raise FileError(f"{path}: cannot be read as a tokenizer ({error})") from error

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
        pieces = iter(_pieces(text))
        while some := list(itertools.islice(pieces, AT_ONCE)):
            for piece in self.engine.encode_batch_fast(some, add_special_tokens=False):
                found.append(torch.tensor(piece.ids, dtype=torch.long))
        return torch.cat(found)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids; special tokens are left out, bytes that form no character become �."""
        return self.engine.decode(ids.tolist() if isinstance(ids, Tensor) else list(ids), skip_special_tokens=True)

    def label(self, token: int) -> str:
        """One token as a reader wants to see it: a space as ·, the end of a line as ↵, what cannot be shown by its code."""
        shown = self.engine.decode([token], skip_special_tokens=False)
        shown = shown.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
        return shown if shown.isprintable() else shown.encode("unicode_escape").decode()


def _pieces(text: str) -> Iterable[str]:
    """The text in pieces of about PIECE characters, cut behind a line's end where there is one."""
    start = 0
    while start < len(text):
        stop = min(start + PIECE, len(text))
        line = text.rfind("\n", start, stop) + 1
        stop = line if stop < len(text) and line > start else stop
        yield text[start:stop]
        start = stop
