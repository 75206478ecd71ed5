"""Corpus: the token ids of a text, and batches sampled from them.

    ids      e0 e1 e2 e3 e4 e5 …                    the last fraction is held out for validation
    tokens   e3 e4 e5 e6      labels  e4 e5 e6 e7   `length` tokens from a random offset, and the same shifted by one

A batch is a pure function of (seed, step): a data loader has no state to save.
"""

from __future__ import annotations

import dataclasses as dc
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.base.limits import TEXT_BYTES
from dovetail.disk.untrusted import read_regular
from dovetail.nn.layout import TokenLayout

JSON_LINES = 8  # lines that are parsed to recognize JSON Lines


@dc.dataclass(frozen=True)
class Batch:
    """The inputs and labels of one step."""

    tokens: Tensor  # (batch, n) ids
    labels: Tensor  # (batch, n) ids, −100 where a token is not predicted; (batch,) for a head with one output per row
    layout: TokenLayout  # positions, documents and padding of the tokens
    source: Tensor | None = None  # (batch, m) the input of an encoder
    source_layout: TokenLayout | None = None
    extra: Mapping[str, Tensor] = dc.field(default_factory=dict)  # (batch, …) what else an objective reads of each row, by name
    figures: Mapping[str, float] | None = None  # what was measured when the batch was made, by name: the reward of rollouts

    @property
    def count(self) -> int:
        """The number of tokens without padding."""
        real = int(self.layout.real.sum())
        return real if self.source_layout is None else real + int(self.source_layout.real.sum())

    def pieces(self, count: int) -> list[Batch]:
        """The rows in `count` pieces, or as many as there are rows: every `count`-th row, so that a piece has the same rows
        over all ranks as on one."""
        count = min(count, len(self.tokens))
        return [self] if count == 1 else [self.some_rows(slice(first, None, count)) for first in range(count)]

    def some_rows(self, rows: slice) -> Batch:
        """Some rows of the batch; random numbers are drawn by their number in the whole batch."""
        source, layout = self.source, self.source_layout
        return Batch(
            self.tokens[rows],
            self.labels[rows],
            self.layout.some_rows(rows),
            None if source is None else source[rows],
            None if layout is None else layout.some_rows(rows),
            {name: value[rows] for name, value in self.extra.items()},
        )

    def chunk(self, count: int, which: int) -> Batch:
        """One of `count` equal chunks of every row; labels are those of its tokens."""
        assert self.labels.shape == self.tokens.shape, "rows of one label per token"
        tokens, labels = (x.chunk(count, -1)[which] for x in (self.tokens, self.labels))
        return Batch(tokens, labels, self.layout.cut(count, which))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; itself where it lies there."""
        if self.tokens.device == device:
            return self
        source, layout = self.source, self.source_layout
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            self.layout.to(device),
            None if source is None else source.to(device),
            None if layout is None else layout.to(device),
            {name: value.to(device) for name, value in self.extra.items()},
        )


def read_corpus(path: str | Path) -> str:
    """Return the text of a regular UTF-8 file of at most TEXT_BYTES; JSON is refused."""
    path = Path(path)
    text = read_regular(path, TEXT_BYTES, "a text").replace("\r\n", "\n").replace("\r", "\n")
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
    """Token ids to train on, and held-out ones."""

    train: Tensor  # (n,)
    held_out: Tensor  # (m,)

    @staticmethod
    def cut(ids: Tensor, length: int, fraction: float = 0.05, name: str = "the text") -> Corpus:
        """Hold out the last `fraction` of the ids, at least one sequence of `length` tokens."""
        held_out = max(int(len(ids) * fraction), length + 1)
        if len(ids) < 2 * held_out:
            need = 2 * (length + 1)
            raise FileError(f"{name}: {len(ids)} tokens are too few for sequences of {length}; give {need} or shorten --length")
        return Corpus(ids[:-held_out], ids[-held_out:])

    def batch(self, seed: int, step: int, batch: int, length: int) -> Batch:
        """Return `batch` sequences of `length` tokens from random offsets, sampled from (seed, step)."""
        return _windows(self.train, self.starts(seed, step, batch, length), length)

    def starts(self, seed: int, step: int, batch: int, length: int) -> Tensor:
        """(batch,) the first token of each sequence of a step."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        return torch.randint(0, len(self.train) - length, (batch,), generator=generator)

    def validation(self, batch: int, length: int, most: int = 8) -> Iterator[Batch]:
        """Yield up to `most` batches of sequences at even offsets of the held-out ids; the same at every call."""
        offsets = len(self.held_out) - length
        count = min(most * batch, max(1, offsets // length))
        starts = torch.linspace(0, offsets - 1, count, dtype=torch.float64).long()
        for some in starts.split(batch):
            yield _windows(self.held_out, some, length)


def _windows(ids: Tensor, starts: Tensor, length: int) -> Batch:
    rows = ids[starts[:, None] + torch.arange(length + 1)]
    return Batch(tokens=rows[:, :-1], labels=rows[:, 1:], layout=TokenLayout.whole(len(starts), length))
