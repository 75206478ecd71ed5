"""TokenLayout: position, order, document and row of each token. Masks, positions and caches read nothing else about a token.

    coords (…, n, c)  integer coordinates, which position parts encode: c = 1 for text, 2 for an image, 3 for video. Equal to
                      the order, unless an embedding or the caller gives others (`at`)
    order  (…, n)     the index of a token in its document: decides causality and distance; 0 at the first real token
    seg    (…, n)     the document a token belongs to within its row; −1 is padding
    row    (n,)       flat batches only: the sequence a token belongs to
    sample (…, n)     the number of a token's document in the whole batch; dropout differs by it
    start             an int where it is known without reading tensors that every row holds the tokens start, start + 1, … of
                      one document, without padding; else None

`…` is `batch`, or nothing for a flat batch, which holds tokens of many sequences in one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords

T = TypeVar("T")


class Known(NamedTuple):
    """What is known of a layout without reading its tensors, which would wait for a GPU; None: not known."""

    documents: tuple[int, ...] | None = None  # the number of documents of each row
    end: int | None = None  # no order is as large
    spans: tuple[tuple[int, int], ...] | None = None  # flat batches: the first order and the number of tokens of each row


@checks_keywords
class TokenLayout:
    """Position, order, document and row of each token; the head of the file lists the fields."""

    __slots__ = ("_coords", "_rows", "_sample", "_seg", "known", "memo", "order", "row", "start")

    def __init__(
        self,
        coords: Tensor | None,  # None: one coordinate, equal to the order
        order: Tensor,
        seg: Tensor | None,  # None: one document per row, without padding
        row: Tensor | None = None,
        start: int | None = None,
        rows: int | None = None,  # flat batches: the number of sequences, those without a token included
        sample: Tensor | None = None,  # None: the row, and 2²⁰ more per document before it in the row
        known: Known | None = None,
    ) -> None:
        self.known = Known() if known is None else known
        self._sample = sample
        self._coords, self.order, self._seg, self.row, self.start, self._rows = coords, order, seg, row, start, rows
        self.memo: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        shape = f"{self.n} tokens" if self.order.dim() == 1 else " × ".join(map(str, self.order.shape))
        facts = [shape] if self.row is None else [f"flat, {self.n} tokens in {self.rows} rows"]
        if self.start is not None:
            facts.append(f"orders {self.start} to {self.start + self.n - 1}")
        elif self.order.device.type != "meta" and self.order.numel():
            facts.append(f"orders {self.order.min().item()} to {self.order.max().item()}")
            if padding := int((~self.real).sum()):
                facts.append(f"{padding} of padding")
        if self.coords.shape[-1] > 1:
            facts.append(f"{self.coords.shape[-1]} coordinates")
        return f"TokenLayout({', '.join(facts)})"

    @property
    def coords(self) -> Tensor:
        """(…, n, c) the coordinates of each token."""
        return self.order[..., None] if self._coords is None else self._coords

    @property
    def position(self) -> Tensor:
        """(…, n) what a part with one coordinate encodes: the coordinate of tokens that have one, else their order."""
        return self.order if self._coords is None or self._coords.shape[-1] > 1 else self._coords[..., 0]

    def coords_for(self, count: int) -> Tensor:
        """(…, n, count) the coordinates that a part with `count` of them encodes; text has the same on each."""
        if count == 1:
            return self.position[..., None]
        coords = self.coords
        if coords.shape[-1] not in (1, count):
            what = f"tokens with {coords.shape[-1]} coordinates, and a position that encodes {count}"
            raise InputError(f"layout: {what} (give each token {count} coordinates, or 1)")
        return coords.expand(*coords.shape[:-1], count)

    def at(self, coords: Tensor) -> TokenLayout:
        """The same tokens at other coordinates (…, n, c); what comes before what stays."""
        if coords.shape[:-1] != self.order.shape or coords.is_floating_point():
            what = f"coordinates are {coords.dtype} {tuple(coords.shape)}"
            raise InputError(f"layout: {what}; give integers {(*self.order.shape, 'c')}: one vector per token")
        return TokenLayout(coords, self.order, self._seg, self.row, self.start, self._rows, self._sample, self.known)

    @property
    def alike(self) -> bool:
        """Whether it is known without reading tensors that all rows of a batch hold the same orders and coordinates."""
        same = self._coords is None or self._coords.shape[0] == 1 or self._coords.stride(0) == 0
        return self.start is not None and self.order.dim() > 1 and same

    @property
    def seg(self) -> Tensor:
        """(…, n) the document of each token, −1 for padding."""
        return torch.zeros_like(self.order) if self._seg is None else self._seg

    @property
    def sample(self) -> Tensor:
        """(…, n) the number of the document of each token in the whole batch, all ranks included."""
        if self._sample is not None:
            return self._sample
        row = self.row
        if row is None:
            row = torch.arange(self.order.shape[:-1].numel(), device=self.order.device).view(*self.order.shape[:-1], 1)
        return (row if self._seg is None else row + (self._seg.clamp_min(0) << 20)).expand(self.order.shape)

    @property
    def has_samples(self) -> bool:
        """Whether the numbers of documents were given; else they count the rows of this layout from 0."""
        return self._sample is not None

    def numbered(self, first: int) -> TokenLayout:
        """The same tokens with samples counted from `first`: the rows of one data-parallel rank, or a row by itself."""
        return TokenLayout(
            self._coords, self.order, self._seg, self.row, self.start, self._rows, self.sample + first, self.known
        )

    @property
    def n(self) -> int:
        """Tokens per row; all tokens of a flat batch."""
        return self.order.shape[-1]

    @property
    def rows(self) -> int:
        """The number of sequences of a flat batch, those without a token in this step included."""
        assert self.row is not None, "not a flat batch"
        if self._rows is None:
            self._rows = int(self.row.max()) + 1 if self.n else 0
        return self._rows

    @property
    def longest(self) -> int:
        """The tokens of the longest row of a flat batch."""
        assert self.row is not None, "not a flat batch"
        if self.known.spans is not None:
            return max((tokens for _, tokens in self.known.spans), default=0)
        counts = torch.zeros(self.rows, dtype=torch.long, device=self.row.device)
        return int(counts.scatter_add(0, self.row, torch.ones_like(self.row)).max())

    @property
    def documents(self) -> tuple[int, ...]:
        """The number of documents of each row of a batch that is not flat."""
        if self.start is not None:
            return (1,) * self.order.shape[0]
        return self.known.documents or tuple((self.seg.amax(-1) + 1).clamp_min(1).tolist())

    @property
    def end(self) -> int | None:
        """A number that no order reaches; None where only a device knows it, or a compiled graph."""
        if self.start is not None:
            return self.start + self.n
        if self.known.end is not None or torch.compiler.is_compiling() or self.order.device.type != "cpu":
            return self.known.end
        return int(self.order.max()) + 1

    @property
    def real(self) -> Tensor:
        """(…, n) true where there is a token, false at padding."""
        return self.seg >= 0

    def expect(self, x: Tensor, what: str) -> None:
        """Raise InputError unless x (…, n, channels) has one vector for each token. Without this, a layout of another batch
        size would broadcast."""
        if x.shape[:-1] != self.order.shape:
            raise InputError(
                f"{what}: the layout describes tokens of shape {tuple(self.order.shape)}, but there are {tuple(x.shape[:-1])}"
                " (pass a TokenLayout of the shape of the inputs)"
            )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return make(), cached under `key`: for tensors that are equal in every layer of a step (rotary tables, masks)."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def once_for(self, queries: TokenLayout, key: Hashable, make: Callable[..., T], *given: Any) -> T:
        """Return make(*given), cached for the layout of the queries that attend to these keys."""
        asker = None if queries is self else queries  # not self: a cycle would keep the masks of a step alive after it
        cached_for, value = self.memo.get(key, (self, None))
        if cached_for is not asker:
            value = make(*given)
            self.memo[key] = (asker, value)
        return value

    def to(self, device: torch.device | str) -> TokenLayout:
        """The same tokens on a device; what was computed for them stays behind."""
        if self.order.device == torch.device(device):
            return self
        tensors = (self._coords, self.order, self._seg, self.row, self._sample)
        coords, order, seg, row, sample = (None if x is None else x.to(device) for x in tensors)
        assert order is not None
        return TokenLayout(coords, order, seg, row, self.start, self._rows, sample, self.known)

    def pick(self, index: Any) -> TokenLayout:
        """The tokens that `index` (a slice or a tensor of indices) selects along n."""
        row = None if self.row is None else self.row[index]
        coords = None if self._coords is None else self._coords[..., index, :]
        seg = None if self._seg is None else self._seg[..., index]
        sample = None if self._sample is None else self._sample[..., index]
        return TokenLayout(coords, self.order[..., index], seg, row, rows=self._rows, sample=sample)

    def next_of(self, x: Tensor, missing: int) -> Tensor:
        """(…, n) the value of x (…, n) at the next token of the same document; `missing` where there is none."""
        last = x.new_full((*x.shape[:-1], 1), missing)
        following = torch.where(self._together(1) & self.real[..., :-1], x[..., 1:], missing)
        return torch.cat([following, last], -1)

    def ahead(self, k: int) -> TokenLayout:
        """The first n − k tokens of each row; those whose document has no k-th token after them are padding."""
        first = slice(0, max(self.n - k, 0))
        picked = self.pick(first)
        if self.start is not None:
            return TokenLayout(picked._coords, picked.order, None, start=self.start, sample=picked._sample)
        seg = torch.where(self._together(k), self.seg[..., first], -1)
        known = Known(self.known.documents, self.known.end)
        return TokenLayout(picked._coords, picked.order, seg, picked.row, None, self._rows, self.sample[..., first], known)

    def _together(self, k: int) -> Tensor:
        """(…, n − k) whether each token and the k-th after it are in one document."""
        first, later = slice(0, max(self.n - k, 0)), slice(k, None)
        same = self.seg[..., first] == self.seg[..., later]
        return same if self.row is None else same & (self.row[first] == self.row[later])

    def cut(self, parts: int, which: int) -> TokenLayout:
        """One of `parts` equal pieces of the sequence."""
        size = self.n // parts
        return self.pick(slice(which * size, (which + 1) * size))

    def split_rows(self, parts: int, which: int) -> TokenLayout:
        """One of `parts` equal groups of rows of a batch that is not flat; samples keep their numbers in the whole batch."""
        count = self.order.shape[0]
        if self.row is not None or count % parts:
            problem = "a flat batch has no rows" if self.row is not None else f"{count} rows"
            raise InputError(f"layout: {problem} to split into {parts} equal groups (pad it to a multiple of {parts})")
        size = count // parts
        return self.some_rows(slice(which * size, (which + 1) * size))

    def some_rows(self, rows: slice) -> TokenLayout:
        """Some rows of a batch that is not flat; samples keep their numbers in the whole batch."""
        coords, seg = (None if x is None else x[rows] for x in (self._coords, self._seg))
        documents = None if self.known.documents is None else self.known.documents[rows]
        known = self.known._replace(documents=documents)
        return TokenLayout(coords, self.order[rows], seg, start=self.start, sample=self.sample[rows], known=known)

    @staticmethod
    def of(
        order: Tensor,
        seg: Tensor,
        row: Tensor | None = None,
        start: int | None = None,
        rows: int | None = None,
        known: Known | None = None,
    ) -> TokenLayout:
        """Text: one coordinate, equal to the order."""
        return TokenLayout(None, order, seg, row, start, rows, known=known)

    @staticmethod
    def whole(batch: int, n: int, device: torch.device | str | None = None, start: int = 0) -> TokenLayout:
        """A batch of whole sequences without padding."""
        order = torch.arange(start, start + n, device=device).expand(batch, n)
        return TokenLayout(None, order, None, start=start)

    @staticmethod
    def padded(lengths: Sequence[int], n: int, left: bool = False, device: torch.device | str | None = None) -> TokenLayout:
        """A batch of sequences padded to n; the first real token of each has order 0."""
        place, count = torch.arange(n, device=device), torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
        order = place - (n - count) if left else place.expand(len(lengths), n)
        real = (order >= 0) & (order < count)
        known = Known((1,) * len(lengths), max(lengths, default=0))
        return TokenLayout.of(torch.where(real, order, 0), torch.where(real, 0, -1), known=known)

    @staticmethod
    def packed(rows: Sequence[Sequence[int]], n: int, device: torch.device | str | None = None) -> TokenLayout:
        """Several documents per row, one behind the other, then padding. Samples are numbered as in a padded batch."""
        order, seg, sample, documents = list[list[int]](), list[list[int]](), list[list[int]](), 0
        for lengths in rows:
            numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
            padding = n - len(numbers)
            order.append([i for length in lengths for i in range(length)] + [0] * padding)
            seg.append(numbers + [-1] * padding)
            sample.append([documents + number for number in numbers] + [documents] * padding)
            documents += len(lengths)
        order, seg, sample = (torch.tensor(x, dtype=torch.long, device=device).view(len(rows), n) for x in (order, seg, sample))
        known = Known(tuple(max(len(row), 1) for row in rows), max((length for row in rows for length in row), default=0))
        return TokenLayout(None, order, seg, sample=sample, known=known)

    @staticmethod
    def flat(
        lengths: Sequence[int], starts: Sequence[int] | None = None, device: torch.device | str | None = None
    ) -> TokenLayout:
        """Tokens of many sequences in one dimension, prefill and decode mixed; a length may be 0."""
        starts = starts or [0] * len(lengths)
        order = torch.cat([torch.arange(s, s + m, device=device) for s, m in zip(starts, lengths, strict=True)])
        row = torch.cat([torch.full((m,), i, device=device) for i, m in enumerate(lengths)])
        spans = tuple(zip(starts, lengths, strict=True))
        known = Known(end=max((start + length for start, length in spans if length), default=0), spans=spans)
        return TokenLayout.of(order, torch.zeros_like(order), row, rows=len(lengths), known=known)
