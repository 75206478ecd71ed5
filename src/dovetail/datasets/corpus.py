"""A text as token ids, and batches drawn from it.

    ids      e0 e1 e2 e3 e4 e5 …                    the last share is held out for validation
    tokens   e3 e4 e5 e6      labels  e4 e5 e6 e7   `length` tokens from a random place, and the same one further

A batch is a pure function of (seed, step): no state to save, and a run that stopped goes on with what it would have seen.
"""

from __future__ import annotations

import dataclasses as dc
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.core.layout import TokenLayout

LARGEST_TEXT = 256 << 20  # bytes read into memory: a larger text asks for shards
JSON_LINES = 8  # lines that are parsed to recognize JSON Lines


@dc.dataclass(frozen=True)
class Batch:
    """What one step learns from."""

    tokens: Tensor  # (batch, n) ids
    labels: Tensor  # (batch, n) the wanted ids, −100 where none is; (batch,) for a head that answers once a row
    layout: TokenLayout  # where the tokens stand
    source: Tensor | None = None  # (batch, m) what an encoder reads
    source_layout: TokenLayout | None = None

    @property
    def count(self) -> int:
        """Tokens in it, padding left out."""
        real = int(self.layout.real.sum())
        return real if self.source_layout is None else real + int(self.source_layout.real.sum())


def read_corpus(path: str | Path) -> str:
    """A UTF-8 text of bounded size."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > LARGEST_TEXT:
            raise FileError(f"{path}: {size} bytes are more than the {LARGEST_TEXT} that are read; cut the text")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8"
        raise FileError(f"{path}: {what}; convert it, say with `iconv -f latin1 -t utf-8`") from error
    if not text.strip():
        raise FileError(f"{path}: is empty")
    if _is_json(text):
        raise FileError(f"{path}: is JSON, not plain text; extract the text first, e.g. `jq -r .text data.jsonl > data.txt`")
    return text


def _is_json(text: str) -> bool:
    """Return whether the text is one JSON array or object, or JSON Lines: its first lines are JSON objects, each of them."""
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        return False
    lines = itertools.islice((line for line in io.StringIO(text) if line.strip()), JSON_LINES)
    return (start == "{" and all(isinstance(_parsed(line), dict) for line in lines)) or _parsed(text) is not None


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dc.dataclass(frozen=True)
class Corpus:
    """Token ids to learn from, and others to be tried on."""

    train: Tensor  # (n,)
    held_out: Tensor  # (m,)

    @staticmethod
    def cut(ids: Tensor, length: int, share: float = 0.05, name: str = "the text") -> Corpus:
        """The last `share` of the ids held out, one window of `length` tokens at least."""
        held = max(int(len(ids) * share), length + 1)
        if len(ids) < 2 * held:
            need = 2 * (length + 1)
            raise FileError(f"{name}: {len(ids)} tokens are too few for windows of {length}; give {need} or shorten --length")
        return Corpus(ids[:-held], ids[-held:])

    def batch(self, seed: int, step: int, batch: int, length: int) -> Batch:
        """`batch` windows of `length` tokens from random places, drawn from (seed, step)."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        starts = torch.randint(0, len(self.train) - length, (batch,), generator=generator)
        return _windows(self.train, starts, length)

    def validation(self, batch: int, length: int, most: int = 8) -> Iterator[Batch]:
        """Up to `most` batches of windows spread evenly over the held-out ids: always the same."""
        room = len(self.held_out) - length
        count = min(most * batch, max(1, room // length))
        starts = torch.linspace(0, room - 1, count, dtype=torch.float64).long()
        for some in starts.split(batch):
            yield _windows(self.held_out, some, length)


def _windows(ids: Tensor, starts: Tensor, length: int) -> Batch:
    rows = ids[starts[:, None] + torch.arange(length + 1)]
    return Batch(tokens=rows[:, :-1], labels=rows[:, 1:], layout=TokenLayout.whole(len(starts), length))
