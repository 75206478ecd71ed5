"""Line: the tokens of a step as rows of sequences, which is how a recurrence reads them.

    real      (rows, n)  false at padding, which must leave a memory as it was; None: all are real
    document  (rows, n)  counts the documents that began in this row; 0 is the one that goes on from what is remembered;
                         None: one document a row
    ends      (rows,)    one more than the last real token's place, 0 where a row has none; None: all rows are full
    begins               known without looking: every row begins its document here, so that nothing remembered matters

A batch is already such rows; a flat batch, tokens of many sequences one behind the other, is spread over rows and back:

    line = line_of(ctx.at)          x = line.spread(x)          y (rows, n, …) = …          return line.gather(y)

A document begins where a real token has order 0: neither where the call begins nor where a neighbour's tokens end.
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.core.at import At


@dc.dataclass
class Line:
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


def line_of(at: At) -> Line:
    """The tokens at `at` as rows, worked out once a step."""
    if at.start is not None:  # one document a row, nothing padded
        return Line(None, None, None, at.start == 0)
    return at.once("line", lambda: _looked_at(at))


def _looked_at(at: At) -> Line:
    if at.row is None:
        return Line(at.real, _documents(at.real, at.order), _ends(at.real), False)
    count = torch.bincount(at.row)
    before = (count.cumsum(0) - count)[at.row]
    # tokens of a row stand in order, but not one behind the other of necessity
    column = torch.empty_like(at.row)
    by_row = at.row.argsort(stable=True)
    column[by_row] = torch.arange(at.n, device=at.row.device)
    column = column - before
    rows, longest = len(count), int(count.max())
    index = torch.zeros(rows, longest, dtype=torch.long, device=at.row.device)
    index[at.row, column] = torch.arange(at.n, device=at.row.device)
    real = torch.arange(longest, device=at.row.device) < count[:, None]
    real = real & at.real[index]
    return Line(real, _documents(real, at.order[index]), _ends(real), False, index, at.row * longest + column)


def _documents(real: Tensor, order: Tensor) -> Tensor:
    return (real & (order == 0)).cumsum(-1)


def _ends(real: Tensor) -> Tensor:
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
