"""Windows to a Batch: documents packed in a row attend to themselves alone.

    ids      a b c │ d e │ f g h        one window of 7 tokens and a label; │ ends a document
    tokens   a b c   d e   f g          labels   b c −  e −  g h       the last token of a document predicts nothing
    seg      0 0 0   1 1   2 2          order    0 1 2  0 1  0 1

With `length`, every window is cut into rows of that many tokens: the same tokens per batch, in shorter sequences.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import numpy as np
import torch

from dovetail.core.errors import UsageError
from dovetail.core.layout import Known, TokenLayout
from dovetail.core.loss import IGNORED
from dovetail.data.corpus import Batch
from dovetail.data.stream import Window


def to_batch(windows: Sequence[Window], *, masks: bool = True, length: int | None = None, first_row: int = 0) -> Batch:
    """Return the batch of windows of equal length.

    `masks` keeps documents apart; without it a row is one document. `first_row` is the number of windows of the global batch
    before these, on other ranks: dropout differs by it.
    """
    ids = np.stack([window.ids for window in windows])
    count, whole = ids.shape[0], ids.shape[1] - 1
    row = whole if length is None else length
    if whole % row:
        raise UsageError(f"length: {row} does not divide the {whole} tokens of a sample")
    tokens, labels = ids[:, :-1], ids[:, 1:].copy()
    shape = (count * (whole // row), row)
    first = first_row * (whole // row)
    if masks:
        begins = np.zeros((count, whole + 1), bool)
        for i, window in enumerate(windows):
            begins[i, window.ends] = True
            labels[i, window.ends - 1] = IGNORED
        layout = _packed(begins[:, :whole].reshape(shape)).numbered(first)
    else:
        layout = TokenLayout.whole(*shape)
        layout = layout.numbered(first) if first else layout
    return Batch(torch.from_numpy(tokens.reshape(shape).copy()), torch.from_numpy(labels.reshape(shape)), layout)


def _packed(begins: np.ndarray) -> TokenLayout:
    """Return the layout of rows without padding; `begins` (rows, n) marks the first token of documents."""
    begins = begins.copy()
    begins[:, 0] = True
    place = np.arange(begins.shape[1])
    order = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    seg = np.cumsum(begins, axis=1) - 1
    known = Known(tuple((seg[:, -1] + 1).tolist()), begins.shape[1])
    return TokenLayout.of(torch.from_numpy(order), torch.from_numpy(seg), known=known)


@dc.dataclass(frozen=True)
class LengthWarmup:
    """Sequence-length warm-up: rows of `first` tokens, then twice as many, … up to the length of a sample.

    Each length below the last has an equal part of `tokens`, the tokens of the warm-up.       Li et al. 2021; Press et al. 2020
    """

    first: int
    tokens: int

    def lengths(self, length: int) -> list[int]:
        """Return the lengths of the warm-up, up to that of a sample."""
        lengths = [length]
        while lengths[0] > self.first and lengths[0] % 2 == 0:
            lengths.insert(0, lengths[0] // 2)
        if lengths[0] != self.first or self.tokens < 1:
            raise UsageError(f"warm-up: {length} is not {self.first} doubled some times, or {self.tokens} tokens are below 1")
        return lengths

    def __call__(self, seen: int, length: int) -> int:
        """Return the length of rows after `seen` tokens; `length` is that of a sample."""
        lengths = self.lengths(length)
        return lengths[min(seen * (len(lengths) - 1) // self.tokens, len(lengths) - 1)]
