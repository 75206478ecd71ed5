"""SequenceRows: the tokens of a step as rows of sequences (rows, n, …), the form that recurrent mixers compute on.

    real      (rows, n)  false at padding, which must leave the recurrent state as it was; None: all tokens are real
    document  (rows, n)  how many documents have begun in this row; 0 is the one that continues from the recurrent state;
                         None: one document per row
    ends      (rows,)    one more than the index of the last real token, 0 where a row has none; None: all rows are full
    begins               whether every row is known to begin its document here, without reading a tensor: no state is read

A batch already has this form. A flat batch is spread over rows and gathered again:

    seq = sequence_rows(ctx.layout)        x = seq.spread(x)        y = f(x)  # (rows, n, …)        return seq.gather(y)

A document begins where a real token has order 0. The first token of a call need not begin one.
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout


@dc.dataclass
class SequenceRows:
    """Tokens as rows of sequences; the head of the file lists the fields."""

    real: Tensor | None
    document: Tensor | None
    ends: Tensor | None
    begins: bool
    index: Tensor | None = None  # (rows, n) flat batches only: the index of the token; any index at padding
    place: Tensor | None = None  # (tokens,) flat batches only: the index of each token in the flattened rows

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
    """The tokens of a layout as rows, computed once per step."""
    if layout.start is not None:  # one document per row, without padding
        return SequenceRows(None, None, None, layout.start == 0)
    return layout.once("sequence rows", lambda: _rows_of(layout))


def _rows_of(layout: TokenLayout) -> SequenceRows:
    if layout.row is None:
        return SequenceRows(layout.real, _documents(layout.real, layout.order), _ends(layout.real), False)
    rows, device = layout.rows, layout.row.device
    count = torch.zeros(rows, dtype=torch.long, device=device).scatter_add(0, layout.row, torch.ones_like(layout.row))
    before = (count.cumsum(0) - count)[layout.row]
    # tokens of one row are in order, but tokens of other rows may lie between them
    column = torch.empty_like(layout.row)
    column[layout.row.argsort(stable=True)] = torch.arange(layout.n, device=device)
    column = column - before
    longest = layout.longest
    index = torch.zeros(rows, longest, dtype=torch.long, device=device)
    index[layout.row, column] = torch.arange(layout.n, device=device)
    real = (torch.arange(longest, device=device) < count[:, None]) & layout.real[index]
    return SequenceRows(real, _documents(real, layout.order[index]), _ends(real), False, index, layout.row * longest + column)


def _documents(real: Tensor, order: Tensor) -> Tensor:
    return (real & (order == 0)).cumsum(-1)


def _ends(real: Tensor) -> Tensor:
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
