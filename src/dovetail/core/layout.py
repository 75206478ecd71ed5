"""At: where each token stands. The one thing masks, positions and caches are told about a token.

    coords (…, n, c)  integer coordinates: c = 1 for text, 2 for an image, 3 for video; positions rotate and embed by these
    order  (…, n)     decides causality and distance alone; restarts at the first real token of a document
    seg    (…, n)     the document a token belongs to within its row; −1 is padding
    row    (n,)       flat batches only: the sequence a token belongs to
    start             known without looking: every row holds start, start + 1, … of one document, nothing padded (else None)

`…` is `batch`, or nothing for a flat batch of tokens from many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class TokenLayout:
    """Where each token stands; see the head of the file for the fields."""

    __slots__ = ("_coords", "_seg", "memo", "order", "row", "start")

    def __init__(
        self,
        coords: Tensor | None,  # None: one coordinate, equal to the order
        order: Tensor,
        seg: Tensor | None,  # None: one document a row, nothing padded
        row: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        self._coords, self.order, self._seg, self.row, self.start = coords, order, seg, row, start
        self.memo: dict[Hashable, Any] = {}

    @property
    def coords(self) -> Tensor:
        """(…, n, c) the coordinates of each token."""
        return self.order[..., None] if self._coords is None else self._coords

    @property
    def seg(self) -> Tensor:
        """(…, n) the document of each token, −1 for padding."""
        return torch.zeros_like(self.order) if self._seg is None else self._seg

    @property
    def n(self) -> int:
        """Tokens a row."""
        return self.order.shape[-1]

    @property
    def real(self) -> Tensor:
        """(…, n) true where there is a token, false at padding."""
        return self.seg >= 0

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What depends on the step alone (rotary tables, dense masks) is made by the first layer that asks."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def once_for(self, queries: TokenLayout, key: Hashable, make: Callable[..., T], *given: Any) -> T:
        """make(*given) the same way, for what depends on who asks too: other queries over these keys get another answer."""
        asker = None if queries is self else queries  # never itself: a cycle would keep a step's masks alive after it
        asked, made = self.memo.get(key, (self, None))
        if asked is not asker:
            made = make(*given)
            self.memo[key] = (asker, made)
        return made

    def pick(self, index: Any) -> TokenLayout:
        """The tokens `index` selects along n: a slice or a tensor of positions."""
        row = None if self.row is None else self.row[index]
        coords = None if self._coords is None else self._coords[..., index, :]
        return TokenLayout(coords, self.order[..., index], None if self._seg is None else self._seg[..., index], row)

    def cut(self, parts: int, which: int) -> TokenLayout:
        """One of `parts` equal pieces of the sequence."""
        size = self.n // parts
        return self.pick(slice(which * size, (which + 1) * size))

    @staticmethod
    def of(order: Tensor, seg: Tensor, row: Tensor | None = None, start: int | None = None) -> TokenLayout:
        """Text: one coordinate, equal to the order."""
        return TokenLayout(None, order, seg, row, start)

    @staticmethod
    def whole(batch: int, n: int, device: torch.device | str | None = None, start: int = 0) -> TokenLayout:
        """A batch of whole sequences without padding."""
        order = torch.arange(start, start + n, device=device).expand(batch, n)
        return TokenLayout(None, order, None, start=start)

    @staticmethod
    def padded(lengths: Sequence[int], n: int, left: bool = False) -> TokenLayout:
        """A batch of sequences padded to n, each counted from its own first token."""
        order, seg = torch.zeros(len(lengths), n, dtype=torch.long), torch.full((len(lengths), n), -1)
        for row, length in enumerate(lengths):
            place = slice(n - length, n) if left else slice(0, length)
            order[row, place], seg[row, place] = torch.arange(length), 0
        return TokenLayout.of(order, seg)

    @staticmethod
    def packed(rows: Sequence[Sequence[int]], n: int) -> TokenLayout:
        """Several documents a row, one behind the other, the rest padding."""
        order, seg = torch.zeros(len(rows), n, dtype=torch.long), torch.full((len(rows), n), -1)
        for row, lengths in enumerate(rows):
            begin = 0
            for document, length in enumerate(lengths):
                order[row, begin : begin + length] = torch.arange(length)
                seg[row, begin : begin + length] = document
                begin += length
        return TokenLayout.of(order, seg)

    @staticmethod
    def flat(lengths: Sequence[int], starts: Sequence[int] | None = None) -> TokenLayout:
        """Tokens of many sequences in one row of tokens, prefill and decode mixed."""
        starts = starts or [0] * len(lengths)
        order = torch.cat([torch.arange(s, s + m) for s, m in zip(starts, lengths, strict=True)])
        row = torch.cat([torch.full((m,), i) for i, m in enumerate(lengths)])
        return TokenLayout.of(order, torch.zeros_like(order), row)
