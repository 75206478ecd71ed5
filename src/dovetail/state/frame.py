"""Frame: what all layers of one state group share in one step: slots to write, slots to read, where the keys stand.

Made once a step; the views of single layers only index with it. Leading dimensions are `batch`, or none for a flat batch of
tokens from many sequences, whose keys then lie one sequence behind the other.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.state.slots import Slots


@dc.dataclass(slots=True)
class Frame:
    """One step of one state group."""

    write: Tensor | None  # (tokens,) slots of the new tokens; padding goes to the bin; None where they end what a slice reads
    read: Tensor | None  # (…, m) slots of the keys; None where a slice of the store reads them
    slice_rows: tuple[int, int, int] | None  # rows, slots a row, keys a row
    key_layout: TokenLayout
    before: bool  # keys are read before the new ones are written, and the new ones joined behind
    begin: int = 0  # the first of the new ones among the keys, where a slice reads both
    view: tuple[torch.Size, tuple[int, ...], tuple[int, ...]] | None = None  # a slice of a store of this shape: sizes, strides


def make_frame(
    slots: Slots, layout: TokenLayout, rows: Sequence[int], held: Sequence[int], new: Sequence[int], all_rows: int
) -> Frame:
    """The frame of a step in which row rows[i], holding held[i] tokens, gets new[i] more, standing at `at`."""
    sliced = slots.stride is not None and list(rows) == list(range(all_rows))
    if sliced and layout.start is not None:  # all rows alike, the common step of decoding: no slot need be named
        count = layout.start + layout.n
        if slots.positions(count) == range(count):
            seen = (all_rows, slots.stride or 0, count)
            return Frame(None, None, seen, TokenLayout.whole(all_rows, count), False, layout.start)
    row = torch.tensor(rows, dtype=torch.long)
    each = row[layout.row] if layout.row is not None else row[:, None]
    write = torch.where(layout.real, slots.slot(each, layout.order), slots.total).flatten()
    kept_after = [slots.positions(h + n) for h, n in zip(held, new, strict=True)]
    # a chunk that overruns what the layout keeps would overwrite keys its own first queries still need
    before = any(len(kept) < h + n for kept, h, n in zip(kept_after, held, new, strict=True)) and max(new, default=0) > 1
    kept = [slots.positions(h) for h in held] if before else kept_after
    if layout.row is not None:
        order = torch.cat([_tensor(positions) for positions in kept])
        number = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(positions) for positions in kept]))
        key_layout = TokenLayout.of(order, torch.zeros_like(order), number)
        return Frame(write, slots.slot(row[number], order), None, _joined(key_layout, layout) if before else key_layout, before)
    counts = [len(positions) for positions in kept]
    longest = max(counts)
    order = torch.arange(longest).expand(len(rows), longest)
    real = order < torch.tensor(counts)[:, None]
    order, seg = torch.where(real, order, 0), torch.where(real, 0, -1)
    holes = [i for i, positions in enumerate(kept) if positions != range(len(positions))]  # rows that let tokens go
    for i in holes:
        order[i, : counts[i]] = _tensor(kept[i])
    even = not before and all(count == longest == h + n for count, h, n in zip(counts, held, new, strict=True))
    key_layout = TokenLayout.of(order, seg, start=0 if even else None)
    if sliced and not before and not holes and slots.stride is not None and longest <= slots.stride:
        return Frame(write, None, (all_rows, slots.stride, longest), key_layout, before)
    read = torch.where(real, slots.slot(row[:, None], order), slots.total)
    return Frame(write, read, None, _joined(key_layout, layout) if before else key_layout, before)


def _tensor(positions: Sequence[int]) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop)
    return torch.tensor(positions, dtype=torch.long)


def _joined(old: TokenLayout, new: TokenLayout) -> TokenLayout:
    row = None if old.row is None or new.row is None else torch.cat([old.row, new.row])
    return TokenLayout.of(torch.cat([old.order, new.order], -1), torch.cat([old.seg, new.seg], -1), row)


class TokenView:
    """One layer's memory of tokens, seen through the frame of this step."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame) -> None:
        self.stores, self.frame = stores, frame
        self.blocks: BlockView | None = None  # the layer's memory of blocks of these tokens, where it declares one

    def extend_blocks(self, layout: TokenLayout, *new: Tensor) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """The same for blocks of tokens that are whole now: `at` counts blocks, as does what comes back."""
        assert self.blocks is not None, "no state of this mixer is per block"
        return self.blocks.extend(layout, *new)

    def extend(self, layout: TokenLayout, *new: Tensor) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """Remember the new entries (…, n, *axes); all entries that are there (…, m, *axes), and where they stand."""
        frame = self.frame
        if frame.write is None:
            seen = tuple([self._read(store) for store in self.stores])
            for entries, values in zip(seen, new, strict=True):
                entries[:, frame.begin :] = values
            return seen, frame.key_layout
        if frame.before:
            old = [self._read(store) for store in self.stores]
            self._write(frame.write, new)
            return tuple(torch.cat(pair, layout.order.dim() - 1) for pair in zip(old, new, strict=True)), frame.key_layout
        self._write(frame.write, new)
        return tuple(self._read(store) for store in self.stores), frame.key_layout

    def _write(self, slots: Tensor, new: Sequence[Tensor]) -> None:
        for store, values in zip(self.stores, new, strict=True):
            store.index_copy_(0, slots, values.reshape(-1, *store.shape[1:]))

    def _read(self, store: Tensor) -> Tensor:
        frame = self.frame
        if frame.slice_rows is None:
            assert frame.read is not None
            return store[frame.read]
        if frame.view is None or frame.view[0] != store.shape:  # most stores of a group are alike
            rows, stride, count = frame.slice_rows
            slot, *within = store.stride()
            frame.view = (store.shape, (rows, count, *store.shape[1:]), (stride * slot, slot, *within))
        return store.as_strided(frame.view[1], frame.view[2])


class BlockView:
    """One layer's memory of blocks of tokens: an entry is written when the last token of its block arrives."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame, slots: Slots, rows: Tensor) -> None:
        """`frame` reads what is there after this step; `rows` (rows,) are the rows of this step."""
        self.inner, self.slots, self.rows = TokenView(stores, frame), slots, rows

    def extend(self, layout: TokenLayout, *new: Tensor) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """Remember new blocks (…, b, *axes), whose order is their number in the sequence; all blocks, and their numbers."""
        self.inner._write(layout.once("block slots", lambda: self._where(layout)), new)
        return tuple(self.inner._read(store) for store in self.inner.stores), self.inner.frame.key_layout

    def _where(self, layout: TokenLayout) -> Tensor:
        each = self.rows[layout.row] if layout.row is not None else self.rows[:, None]
        return torch.where(layout.real, self.slots.slot(each, layout.order), self.slots.total).flatten()


class SourceView:
    """One layer's memory of an encoder's output: put at admission, got at every step."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame) -> None:
        self.inner = TokenView(stores, frame)

    def put(self, layout: TokenLayout, *values: Tensor) -> None:
        """Remember the source's entries (batch, m, *axes)."""
        self.inner.extend(layout, *values)

    def get(self) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """The source's entries, and where its tokens stand."""
        return tuple(self.inner._read(store) for store in self.inner.stores), self.inner.frame.key_layout


class SequenceView:
    """One layer's memory of fixed size a sequence: read before a step's tokens, written after them."""

    def __init__(self, stores: Sequence[Tensor], rows: Tensor | None) -> None:
        """`rows` (rows,) are the rows of this step; None: all, in order."""
        self.stores, self.rows = stores, rows

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x as it is, and what each row remembers (rows, *axes); old numbers where a row begins, which `Line` tells."""
        return x, tuple(store[:-1] if self.rows is None else store[self.rows] for store in self.stores)

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Remember (rows, *axes); y as it is."""
        for store, values in zip(self.stores, new, strict=True):
            if self.rows is None:
                store[:-1] = values
            else:
                store[self.rows] = values.to(store.dtype)
        return y
