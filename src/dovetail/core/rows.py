"""Line: the tokens of a step as rows of sequences, which is how a recurrence reads them.

    real      (rows, n)  false at padding, which must leave a memory as it was; None: all are real
    document  (rows, n)  counts the documents that began in this row; 0 is the one that goes on from what is remembered;
                         None: one document a row
    ends      (rows,)    one more than the last real token's place, 0 where a row has none; None: all rows are full
    begins               known without looking: every row begins its document here, so that nothing remembered matters

A batch is already such rows; a flat batch, tokens of many sequences one behind the other, is spread over rows and back:

    line = line_of(ctx.at)          x = line.spread(x)          y (rows, n, …) = …          return line.gather(y)

A document begins where a real token has order 0: neither where the call begins nor where a neighbor's tokens end.
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.core.layout import TokenLayout


@dc.dataclass
class SequenceRows:
    """Tokens as rows of sequences; see the head of the file for the fields."""

    real: Tensor | None
    document: Tensor | None
    ends: Tensor | None
    begins: bool
    index: Tensor | None = None  # (rows, n) flat batches only: the token that stands here, any where there is none
    place: Tensor | None = None  # (tokens,) and the way back: where a token went among rows · n

    def spread(self, x: Tensor) -> Tensor:
        """(rows, n, …) from (…, n, …)."""
        return x if self.index is None else x[self.index]

    def gather(self, y: Tensor) -> Tensor:
        """(…, n, …) from (rows, n, …)."""
        return y if self.place is None else y.flatten(0, 1)[self.place]

    def only_real(self, x: Tensor) -> Tensor:
        """x (rows, n, …) with zeros at padding."""
        if self.real is None:
            return x
        return x * self.real.view(*self.real.shape, *[1] * (x.dim() - 2))


def sequence_rows(layout: TokenLayout) -> SequenceRows:
    """The tokens at `at` as rows, worked out once a step."""
    if layout.start is not None:  # one document a row, nothing padded
        return SequenceRows(None, None, None, layout.start == 0)
    return layout.once("line", lambda: _looked_at(layout))


def _looked_at(layout: TokenLayout) -> SequenceRows:
    if layout.row is None:
        return SequenceRows(layout.real, _documents(layout.real, layout.order), _ends(layout.real), False)
    count = torch.bincount(layout.row)
    before = (count.cumsum(0) - count)[layout.row]
    # tokens of a row stand in order, but not one behind the other of necessity
    column = torch.empty_like(layout.row)
    by_row = layout.row.argsort(stable=True)
    column[by_row] = torch.arange(layout.n, device=layout.row.device)
    column = column - before
    rows, longest = len(count), int(count.max())
    index = torch.zeros(rows, longest, dtype=torch.long, device=layout.row.device)
    index[layout.row, column] = torch.arange(layout.n, device=layout.row.device)
    real = torch.arange(longest, device=layout.row.device) < count[:, None]
    real = real & layout.real[index]
    return SequenceRows(real, _documents(real, layout.order[index]), _ends(real), False, index, layout.row * longest + column)


def _documents(real: Tensor, order: Tensor) -> Tensor:
    return (real & (order == 0)).cumsum(-1)


def _ends(real: Tensor) -> Tensor:
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
