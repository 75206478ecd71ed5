"""Tokenizer: text to token ids and back, by a tokenizer.json of any kind; the engine is Hugging Face's tokenizers.

Training text is plain text (`encode`): special tokens are neither recognized in it nor added. A prompt is encoded as by
transformers (`prompt`): special tokens in it are recognized, and those of the tokenizer's template are added.

The flag of the engine that tells the two apart belongs to all threads that use it. So there are two engines, and neither is
changed once it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Engine

from dovetail.base.errors import FileError, InputError
from dovetail.base.keywords import checks_keywords
from dovetail.base.limits import (
    PROMPT_CHARACTERS,
    TOKENIZER_ADDED,
    TOKENIZER_BYTES,
    TOKENIZER_DEPTH,
    TOKENIZER_GROWTH,
    TOKENIZER_IDS,
    TOKENIZER_ITEMS,
)
from dovetail.disk.model_files import TOKENIZER_FILE
from dovetail.disk.untrusted import Directory
from dovetail.text.split import bounded, components, cuts_are_exact, pieces

if TYPE_CHECKING:
    from torch import Tensor

END, MASK = (
    "<|end|>",
    "<|mask|>",
)  # ids 0 and 1 of tokenizers trained here: end of text, and the mask of masked language modeling
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
LARGE = re.compile(r"\d{8}")  # an integer above TOKENIZER_IDS has eight digits at least
NO_BRACKETS = re.compile(r"[^\[\]{}]+")
PANICS = "pyo3_runtime"  # the module of the exception that a panic in Rust raises
PIECE = 1 << 16  # characters encoded as one where the text can be cut
AT_ONCE = 16  # pieces encoded together


def check_tokenizer(where: Directory) -> None:
    """Raise FileError unless a model directory has a tokenizer."""
    if not where.has(TOKENIZER_FILE):
        raise FileError(f"{where.place}: has no {TOKENIZER_FILE}, so it reads no text; copy that of the original model into it")


@checks_keywords
class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engine.encode_special_tokens = True  # "<|end|>" in training text is plain text
        self._prompts: Engine | None = None

    @staticmethod
    def load(directory: str | Path) -> Tokenizer:
        """Return the tokenizer of a model directory."""
        where = Directory(directory)
        check_tokenizer(where)
        path, text = where.place / TOKENIZER_FILE, where.text(TOKENIZER_FILE, TOKENIZER_BYTES)
        _check_bounds(text, path)
        with _engine_errors(f"{path}: cannot be read as a tokenizer"), _without_panic_messages:
            engine = Engine.from_str(text)
            engine.no_padding()  # padding and truncation of the file are for batches
            engine.no_truncation()
            _check_growth(engine, path)
            _check_ids(engine, text, path)
            added = engine.num_special_tokens_to_add(False)
            if added <= TOKENIZER_ADDED:
                engine.decode(engine.encode("a").ids)  # components that do not fit each other panic here
        if added > TOKENIZER_ADDED:
            raise FileError(f"{path}: adds {added:,} special tokens to a prompt; the limit is {TOKENIZER_ADDED:,}")
        return Tokenizer(engine)

    def with_special(self, names: Sequence[str]) -> Tokenizer:
        """Return the tokenizer with further special tokens, whose ids follow the others; those that it has already stay."""
        engine = Engine.from_str(self.engine.to_str())
        engine.add_special_tokens(list(names))
        return Tokenizer(engine)

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self.engine.to_str(pretty=True)

    @property
    def size(self) -> int:
        """The number of token ids."""
        return self.engine.get_vocab_size(with_added_tokens=True)

    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(i for i, token in self.engine.get_added_tokens_decoder().items() if token.special)

    def id_of(self, token: str) -> int:
        """Return the id of a token of the vocabulary."""
        token_id = self.engine.token_to_id(token)
        if token_id is None:
            raise FileError(f"{TOKENIZER_FILE}: has no token {token!r}")
        return token_id

    def encode(self, text: str) -> Tensor:
        """Return the ids (n,) of plain text: special tokens are neither added nor recognized in it.

        The engine needs 130 to 300 bytes of memory per character that it encodes at once: PIECE · AT_ONCE characters, so at
        most 0.3 GB. A longer text is cut into pieces. The ids are those of the whole text where `cuts_are_exact` and the text
        has a cut in every PIECE characters; elsewhere (text without spaces, a tokenizer of unknown components) tokens may
        differ at the cuts.
        """
        import torch  # here, so that the workers of a build, which call encode_batch, do without its memory and its seconds

        return torch.from_numpy(self._encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the ids of several plain texts, as `encode` does; short ones are encoded together."""
        short = [text for text in texts if len(text) <= PIECE]
        with _engine_errors(f"{TOKENIZER_FILE}: cannot encode the text"):
            encodings = iter(self.engine.encode_batch_fast(short, add_special_tokens=False))
        return [np.array(next(encodings).ids, np.int64) if len(text) <= PIECE else self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.int64]:
        _check_unicode(text)
        if len(text) <= PIECE or cuts_are_exact(self.engine):
            parts, together = bounded(pieces(text, PIECE), PIECE), AT_ONCE
        else:
            parts, together = bounded(pieces(text, PIECE * AT_ONCE), PIECE * AT_ONCE), 1
        ids = [np.zeros(0, np.int64)]
        while some := list(itertools.islice(parts, together)):
            with _engine_errors(f"{TOKENIZER_FILE}: cannot encode the text"):
                encodings = self.engine.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int64) for encoding in encodings]
        return np.concatenate(ids)

    def prompt(self, text: str, *, add_special: bool = True, recognized: bool = True) -> list[int]:
        """Return the ids of a prompt; `add_special` adds special tokens, which a chat template writes itself. Special tokens in
        the text are `recognized`, or are text. Those in messages are text in either case: literal.py."""
        _check_unicode(text)
        if len(text) > PROMPT_CHARACTERS:
            raise InputError(f"the prompt has {len(text):,} characters; the limit is {PROMPT_CHARACTERS:,}")
        with _engine_errors(f"{TOKENIZER_FILE}: cannot encode the prompt"), _without_panic_messages:
            engine = self._of_prompts() if recognized else self.engine
            return engine.encode(text, add_special_tokens=add_special).ids

    def _of_prompts(self) -> Engine:
        """The engine that recognizes special tokens in text."""
        if (engine := self._prompts) is None:
            engine = Engine.from_str(self.engine.to_str())
            engine.encode_special_tokens = False
            self._prompts = engine  # of two threads that make one, either is right
        return engine

    def pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of a pair of texts, joined as the tokenizer's template does, and the token type of each."""
        for text in (first, second):
            _check_unicode(text)
            if len(text) > PROMPT_CHARACTERS:
                raise InputError(f"a text has {len(text):,} characters; the limit is {PROMPT_CHARACTERS:,}")
        with _engine_errors(f"{TOKENIZER_FILE}: cannot encode the pair"), _without_panic_messages:
            encoding = self.engine.encode(first, second)
            return encoding.ids, encoding.type_ids

    def spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, for each of several texts, the ids of a prompt, and of each token the characters (start, stop) of the text
        that it stands for; (0, 0) for the special tokens that are added. Special tokens in a text are text."""
        for text in texts:
            _check_unicode(text)
        with _engine_errors(f"{TOKENIZER_FILE}: cannot encode the text"), _without_panic_messages:
            return [(encoding.ids, encoding.offsets) for encoding in self.engine.encode_batch(list(texts))]

    def decode(self, ids: Tensor | Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids, by default without special tokens; bytes that form no character become �."""
        return self._decode(list(ids) if isinstance(ids, Sequence) else ids.tolist(), skip_special)

    def label(self, token: int) -> str:
        """Return a token for display: a space as ·, a line end as ↵, a tab as ⇥, unprintable characters as escapes."""
        shown = self._decode([token], skip_special=False)
        shown = shown.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
        return shown if shown.isprintable() else shown.encode("unicode_escape").decode()

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        with _engine_errors(f"{TOKENIZER_FILE}: cannot decode token ids"):
            return self.engine.decode(ids, skip_special_tokens=skip_special)


@contextlib.contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Raise FileError for the errors of the engine: bare Exception, or a panic, which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, FileError) or (not isinstance(error, Exception) and type(error).__module__ != PANICS):
            raise  # an error of ours, or an interrupt
        raise FileError(f"{what} ({str(error)[:300]})") from error


class _Stderr:
    """The process's stderr while threads may panic in Rust, which prints a page there before it is raised.

    It is redirected to a file from the first thread that enters to the last that leaves. What other threads wrote meanwhile is
    written then, unless one of them panicked.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.panicked = False

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            self.panicked = self.panicked or (kind is not None and kind.__module__ == PANICS)
            if self.inside == 0:
                self.end()

    def begin(self) -> None:
        """Redirect stderr; where it is closed there is nothing to redirect."""
        self.panicked, self.file = False, None
        with contextlib.suppress(OSError, AttributeError, ValueError):
            sys.stderr.flush()
            self.before = os.dup(2)
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
            os.dup2(self.file.fileno(), 2)

    def end(self) -> None:
        """Restore stderr."""
        if self.file is None:
            return
        os.dup2(self.before, 2)
        os.close(self.before)
        with self.file as file, contextlib.suppress(OSError):
            file.seek(0)
            if not self.panicked and (written := file.read()):
                os.write(2, written)


_without_panic_messages = _Stderr()


def _check_growth(engine: Engine, path: Path) -> None:
    """Raise for components that lengthen a text without bound: a replacement multiplies its length by that of its content."""
    for component, inner in ((engine.normalizer, "normalizers"), (engine.decoder, "decoders")):
        growth, before = 1, 0
        for part in components(component, inner) if component is not None else ():
            growth *= max(1, len(part.get("content", ""))) if part["type"] == "Replace" else 1
            before += len(part.get("prepend", ""))
        if max(growth, before) > TOKENIZER_GROWTH:
            problem = f"its {inner} lengthen a text {growth:,} times, or put {before:,} characters before it"
            raise FileError(f"{path}: {problem}; the limit is {TOKENIZER_GROWTH}")


def _check_ids(engine: Engine, text: str, path: Path) -> None:
    """Raise for an id that is far above the others. The vocabulary is looked at only where the file has so large a number."""
    if LARGE.search(text) and (largest := max(engine.get_vocab().values(), default=0)) >= TOKENIZER_IDS:
        raise FileError(f"{path}: has a token of id {largest:,}; the limit is {TOKENIZER_IDS:,}")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"character {error.start} of the text is not Unicode ({error.reason}); give UTF-8") from error


def _check_bounds(text: str, path: Path) -> None:
    """Raise for a file with too many items or nested too deeply, before the engine parses it."""
    items = sum(text.count(sign) for sign in "[{,:")
    if items > TOKENIZER_ITEMS:
        raise FileError(f"{path}: holds {items:,} items; the limit is {TOKENIZER_ITEMS:,}")
    depth = deepest = 0
    for sign in NO_BRACKETS.sub("", STRINGS.sub("", text)):
        depth += 1 if sign in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > TOKENIZER_DEPTH:
        raise FileError(f"{path}: is nested {deepest:,} levels deep; the limit is {TOKENIZER_DEPTH}")
