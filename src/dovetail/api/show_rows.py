"""The rows of a tuning file as the model reads them: every token, and which of them it learns."""

from __future__ import annotations

import dataclasses as dc
import itertools
from pathlib import Path
from typing import Any

from dovetail.api.result import Result
from dovetail.data.chats import read_rows
from dovetail.disk.untrusted import Directory
from dovetail.hf.files import read_vocabulary
from dovetail.text.conversation import Encoded
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.tuning import turn_encoder
from dovetail.views.blocks import StyledText, View
from dovetail.views.corpus import LEGEND, example_text

NAMES = {1: ("",), 2: ("chosen", "rejected")}  # of the examples of a row


@dc.dataclass(frozen=True, repr=False)
class ShownRow:
    """A row: its place in the file, and the token ids of its examples with those that are learned."""

    where: str
    examples: tuple[Encoded, ...]


@dc.dataclass(frozen=True, repr=False)
class ShownRows(Result):
    """The first rows of a tuning file, and the counts of all of them."""

    path: Path
    tokenizer: Tokenizer
    rows: int
    tokens: int
    learned: int
    longest: int  # tokens of an example
    shown: tuple[ShownRow, ...]

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "where": row.where,
                "examples": [{"tokens": example.ids.tolist(), "learned": example.answer.tolist()} for example in row.examples],
            }
            for row in self.shown
        ]
        counts = {"rows": self.rows, "tokens": self.tokens, "learned_tokens": self.learned, "longest": self.longest}
        return {"path": str(self.path), **counts, "shown": rows}

    def view(self, width: int) -> View:
        lines = list[str | StyledText]()
        for row in self.shown:
            for name, one in zip(NAMES[len(row.examples)], row.examples, strict=True):
                lines += [f"{row.where} {name}".rstrip(), example_text(one, self.tokenizer), ""]
        share = self.learned / max(self.tokens, 1)
        counts = f"{self.rows:,} rows, {self.tokens:,} tokens, {self.learned:,} of them learned ({share:.1%})"
        return [*lines, f"{self.path}: {counts}; the longest example has {self.longest:,} tokens", LEGEND]


def show_rows(path: Path, model: str | Path, template: str | None, count: int) -> ShownRows:
    """Encode a tuning file by a model's tokenizer and chat template."""
    where = Directory(model)
    encoder = turn_encoder(read_vocabulary(where), template, str(where.place))
    rows, _ = read_rows(path)
    encoded = encoder.encode([(row.where, example) for row in rows for example in row.examples])
    taken = iter(encoded)
    groups = [ShownRow(row.where, tuple(itertools.islice(taken, len(row.examples)))) for row in rows]
    return ShownRows(
        path,
        encoder.tokenizer,
        len(rows),
        sum(len(one.ids) for one in encoded),
        sum(int(one.answer.sum()) for one in encoded),
        max(len(one.ids) for one in encoded),
        tuple(groups[:count]),
    )
