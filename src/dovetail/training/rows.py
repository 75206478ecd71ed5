"""Sources of rows: labeled texts, labeled images (data/rows.py reads their files); training/tagging.py has tagged words,
training/pairs.py pairs of texts.

    held out     a tenth of the rows, a random choice that depends on their number alone: every seed is measured on the same
    batch(step)  rows step·batch … of the epoch's permutation, which is keyed by (seed, epoch); the last rows that make no whole
                 batch are left out, so that no batch holds a row twice

Texts are cut to `length` tokens and padded on the right to the longest; their tokenizer is trained on the rows to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.data.corpus import Batch
from dovetail.data.rows import held_out_rows, read_labeled_images, read_labeled_texts
from dovetail.data.stream import Permutation
from dovetail.model.model import Model
from dovetail.nn.layout import TokenLayout
from dovetail.spec.scope import Scope
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.source import ROWS_NAMED, BatchShape, HeldOut, Note, Rows, Source, Table, TokenizerKind, tokenizer_for

FRACTION = 0.1  # of the rows are held out
EVAL_ROWS = 2048  # held-out rows, at an eval
IMAGES = ".npz"  # the suffix of labeled images; any other file of labels is JSON Lines
Make = Callable[[Rows], Batch]  # rows of the file -> their batch


def from_labels(path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note) -> Source:
    """Read labeled images, or labeled texts and train a tokenizer on them."""
    if path.suffix.lower() == IMAGES:
        return _from_images(path, spec, shape)
    if not spec.embed.token_ids:
        raise SpecError(
            "embed", f"{spec.embed.kind} does not read text", f"give images, a file *{IMAGES}, or --set embed=tokens"
        )
    data = read_labeled_texts(path)
    check_classes(spec, len(data.classes), path)
    train, held_out = held_out_rows(len(data.texts), FRACTION)
    tokenizer, settings = tokenizer_for(path, "\n".join(data.texts[i] for i in train), spec, kind, note)
    texts, labels = PaddedTexts(data.texts, tokenizer, shape.length), torch.from_numpy(data.labels)

    def make(rows: Rows) -> Batch:
        return Batch(texts.tokens[rows], labels[rows], texts.layout(rows))

    found = row_source(path, make, train, held_out, shape, tokenizer, {"labels": str(path), **settings}, data.sha256)
    return found._replace(classes=data.classes)


def _from_images(path: Path, spec: Model, shape: BatchShape) -> Source:
    if spec.embed.token_ids:
        raise SpecError("embed", f"{spec.embed.kind} does not read images", "use a preset of images: vit-tiny")
    data = read_labeled_images(path)
    example = spec.embed.example(spec.axes(Scope()), 1, 1, torch.Generator())
    if not example.is_floating_point():  # ids, which name patches beside tokens
        raise SpecError("embed", f"{spec.embed.kind} does not read whole images", "use a preset of images: vit-tiny")
    wanted = tuple(example.shape[1:])
    if data.images.shape[1:] != wanted:
        raise SpecError("embed", f"reads images of {wanted}; those of {path} are {data.images.shape[1:]}", "change embed.*")
    check_classes(spec, int(data.labels.max()) + 1, path)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    train, held_out = held_out_rows(len(images), FRACTION)

    def make(rows: Rows) -> Batch:
        return Batch(images[rows], labels[rows], TokenLayout.whole(len(rows), spec.embed.tokens() or 1))

    return row_source(path, make, train, held_out, shape, None, {"labels": str(path)}, data.sha256)


class PaddedTexts:
    """Token ids (N, n) of texts, padded on the right, and how many of each are real (N,)."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, length: int) -> None:
        ids = [one[:length] for one in tokenizer.encode_batch(texts)]
        self.lengths = [len(one) for one in ids]
        self.tokens: Tensor = torch.zeros(len(ids), max(1, *self.lengths), dtype=torch.long)
        for row, one in zip(self.tokens, ids, strict=True):
            row[: len(one)] = torch.from_numpy(one)

    def layout(self, rows: Rows) -> TokenLayout:
        return TokenLayout.padded([self.lengths[i] for i in rows], self.tokens.shape[1])


def check_classes(spec: Model, count: int, path: Path) -> None:
    """Raise SpecError where the head has fewer classes than the rows."""
    assert spec.head is not None, "classification has a head"
    classes = spec.head.axes(Scope()).sizes.get("classes", count)
    if count > classes:
        raise SpecError("head.classes", f"{classes}; {path} has {count}", f"--set head.classes={count}")


def row_source(
    path: Path,
    make: Make,
    train: Rows,
    held_out: Rows,
    shape: BatchShape,
    tokenizer: Tokenizer | None,
    settings: Mapping[str, object],
    sha256: str,
    names: Sequence[str] | None = None,
) -> Source:
    """Return the source of rows: batches of `train` in the order of epochs, and of `held_out`. `names` are those of the rows in
    messages, by default their numbers."""
    table = Table(make, len(train) + len(held_out))
    if len(train) < shape.batch:
        count = len(train) + len(held_out)
        raise FileError(f"{path}: {count} rows, {len(held_out)} of them held out, are too few for a batch of {shape.batch}")
    per_epoch = len(train) // shape.batch

    def rows_of(step: int) -> Rows:
        epoch, within = divmod(step, per_epoch)
        numbers = np.arange(within * shape.batch, (within + 1) * shape.batch)
        return train[Permutation(len(train), f"rows {shape.seed} {epoch}")(numbers)]

    def batch(step: int) -> Batch:
        whole = table(rows_of(step))
        return whole if shape.ranks == 1 else whole.some_rows(shape.rows())

    def where(step: int) -> str:
        rows = [int(row) for row in rows_of(step)]
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        if names is not None:
            return f"of {', '.join(names[row] for row in rows[:ROWS_NAMED])}{more}"
        return f"of rows {', '.join(map(str, rows[:ROWS_NAMED]))}{more} of {path}, counted from 0"

    chosen = held_out[:: -(-len(held_out) // EVAL_ROWS)]
    counts = (len(train), len(held_out))
    held_out_batches = HeldOut(table, chosen, shape.batch)
    rows = {"unit": "rows", "epoch": per_epoch, "table": table}
    return Source(batch, held_out_batches, tokenizer, str(path), settings, sha256, *counts, where, **rows)
