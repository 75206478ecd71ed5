"""Frame: the indices that all layers of a state group share in one step: slots to write, slots to read, the layout of the keys.

A frame is computed once per step; the views of the layers index their stores with it. Leading dimensions are `batch`, or none
for a flat batch of tokens from many sequences, whose keys then lie one sequence behind the other.

Views (nn/view.py) are what a mixer sees of its decode state. TokenView is a KV cache, SourceView the keys and values of an
encoder output, BlockView a cache of compressed blocks, SequenceView a recurrent state, SharedView another layer's KV cache.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import KV
from dovetail.ops.attend import StoredEntries
from dovetail.state.pages import PagedEntries, PageRows, Scratch, flat_pieces, pieces
from dovetail.state.slots import Slots


@dc.dataclass(slots=True)
class Frame:
    """One step of one state group."""

    write: Tensor | None  # (tokens,) slots of the new tokens, of padding the last; None: they end the slice that is read
    read: Tensor | None  # (…, m) slots of the keys; None where a slice of the store reads them
    slice_rows: tuple[int, int, int] | None  # rows, slots per row, keys per row
    key_layout: TokenLayout
    before: bool  # keys are read before the new ones are written, and the new ones appended
    begin: int = 0  # index of the first new key, where a slice reads old and new keys
    view: tuple[torch.Size, tuple[int, ...], tuple[int, ...]] | None = None  # that slice: shape of the store, sizes, strides
    # where keys lie in pages: tokens per page, the rows in pieces, and memory for copies
    pages: tuple[int, list[PageRows], Scratch] | None = None


def make_frame(
    slots: Slots,
    layout: TokenLayout,
    rows: Sequence[int],
    lengths: Sequence[int],
    new: Sequence[int],
    all_rows: int,
    coords: Tensor | None = None,
) -> Frame:
    """The frame of a step in which row rows[i], of lengths[i] tokens, gets new[i] more; `layout` is theirs. `coords`: the store
    (slots, c) of the coordinates of tokens, if there is one; those of the new tokens are appended here."""
    frame = _indices(slots, layout, rows, lengths, new, all_rows)
    if coords is not None:  # keys that are rotated on read need them
        (stored,), _ = TokenView([coords], frame).append(layout, layout.coords).entries()
        frame.key_layout = frame.key_layout.at(stored)
    paged = slots.page_table(rows)
    if paged is not None and layout.row is None:
        frame.pages = (paged[0], pieces(paged[1], layout, frame.key_layout), paged[2])
    elif paged is not None and coords is None and sum(new):
        frame.pages = (paged[0], flat_pieces(paged[1], lengths, new), paged[2])
    return frame


def _indices(
    slots: Slots, layout: TokenLayout, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int], all_rows: int
) -> Frame:
    """The frame without coordinates and pages."""
    sliced = slots.stride is not None and list(rows) == list(range(all_rows))
    if sliced and layout.start is not None:  # all rows are alike, as in most decode steps: no slot need be computed
        count = layout.start + layout.order.shape[-1]
        if slots.positions(count) == range(count):
            keys = TokenLayout.whole(all_rows, count, layout.order.device)
            return Frame(None, None, (all_rows, slots.stride or 0, count), keys, False, layout.start)
    device = layout.order.device
    row = torch.tensor(rows, dtype=torch.long, device=device)
    each = row[layout.row] if layout.row is not None else row[:, None]
    write = torch.where(layout.real, slots.slot(each, layout.order), slots.total).flatten()
    after = [slots.positions(length + n) for length, n in zip(lengths, new, strict=True)]
    # a chunk longer than the slack of a ring would overwrite keys that its own first queries still see
    overruns = any(len(stored) < length + n for stored, length, n in zip(after, lengths, new, strict=True))
    before = overruns and max(new, default=0) > 1
    stored = [slots.positions(length) for length in lengths] if before else after
    if layout.row is not None:
        order = torch.cat([_tensor(positions, device) for positions in stored])
        number = torch.cat([torch.full((len(positions),), i, device=device) for i, positions in enumerate(stored)])
        key_layout = TokenLayout.of(order, torch.zeros_like(order), number, rows=len(rows))
        return Frame(write, slots.slot(row[number], order), None, _joined(key_layout, layout) if before else key_layout, before)
    counts = [len(positions) for positions in stored]
    longest = max(counts)
    order = torch.arange(longest, device=device).expand(len(rows), longest)
    real = order < torch.tensor(counts, device=device)[:, None]
    order, seg = torch.where(real, order, 0), torch.where(real, 0, -1)
    gaps = [i for i, positions in enumerate(stored) if positions != range(len(positions))]  # rows with overwritten tokens
    for i in gaps:
        order[i, : counts[i]] = _tensor(stored[i], device)
    even = not before and all(count == longest == length + n for count, length, n in zip(counts, lengths, new, strict=True))
    key_layout = TokenLayout.of(order, seg, start=0 if even else None)
    if sliced and not before and not gaps and slots.stride is not None and longest <= slots.stride:
        return Frame(write, None, (all_rows, slots.stride, longest), key_layout, before)
    read = torch.where(real, slots.slot(row[:, None], order), slots.total)
    return Frame(write, read, None, _joined(key_layout, layout) if before else key_layout, before)


def _tensor(positions: Sequence[int], device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, device=device)
    return torch.tensor(positions, dtype=torch.long, device=device)


def _joined(old: TokenLayout, new: TokenLayout) -> TokenLayout:
    order, seg = torch.cat([old.order, new.order], -1), torch.cat([old.seg, new.seg], -1)
    if old.row is None or new.row is None:
        return TokenLayout.of(order, seg)
    return TokenLayout.of(order, seg, torch.cat([old.row, new.row]), rows=old.rows)


class TokenView:
    """The KV cache of one layer, in the frame of this step."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame) -> None:
        self.stores, self.frame = stores, frame
        self.blocks: BlockView | None = None  # the cache of blocks of these tokens, where the layer declares one
        self.joined: StoredEntries | None = None  # old and new entries of a chunk that overwrites old ones

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """Write the new entries (…, n, *axes). Returns all stored entries (…, m, *axes)."""
        frame = self.frame
        if frame.write is None:
            stored = self._gathered()
            for entries, values in zip(stored.tensors, new, strict=True):
                entries[:, frame.begin :] = values
            return stored
        if frame.before:
            old = [self._read(store) for store in self.stores]
            self._write(frame.write, new)
            joined = tuple(torch.cat(pair, layout.order.dim() - 1) for pair in zip(old, new, strict=True))
            self.joined = StoredEntries(frame.key_layout, joined)
            return self.joined
        self._write(frame.write, new)
        return self.stored()

    def stored(self) -> KV:
        """All stored entries (…, m, *axes)."""
        if self.frame.pages is not None:
            return PagedEntries(self.stores, *self.frame.pages, self._gathered)
        return self._gathered()

    def _gathered(self) -> StoredEntries:
        return StoredEntries(self.frame.key_layout, tuple([self._read(store) for store in self.stores]))

    def append_blocks(self, layout: TokenLayout, *new: Tensor) -> KV:
        """The same for blocks of tokens that are complete now; the layouts count blocks."""
        assert self.blocks is not None, "no state of this mixer is per block"
        return self.blocks.append(layout, *new)

    def _write(self, slots: Tensor, new: Sequence[Tensor]) -> None:
        for store, values in zip(self.stores, new, strict=True):
            store.index_copy_(0, slots, values.reshape(-1, *store.shape[1:]))

    def _read(self, store: Tensor) -> Tensor:
        frame = self.frame
        if frame.slice_rows is None:
            assert frame.read is not None
            return store[frame.read]
        if frame.view is None or frame.view[0] != store.shape:  # most stores of a group have one shape
            rows, stride, count = frame.slice_rows
            slot, *within = store.stride()
            frame.view = (store.shape, (rows, count, *store.shape[1:]), (stride * slot, slot, *within))
        return store.as_strided(frame.view[1], frame.view[2])


class SharedView:
    """The KV cache of an earlier layer, which has appended the entries of this step already."""

    def __init__(self, owner: TokenView) -> None:
        self.owner = owner

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """All entries; nothing is written."""
        return self.stored()

    def stored(self) -> KV:
        """All entries."""
        return self.owner.stored() if self.owner.joined is None else self.owner.joined


class SourceView(TokenView):
    """The entries one layer stores of an encoder output, which were written at admission."""

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """Refuse."""
        raise StateError("the pool holds an encoder output already (give the ctx of a step none)")


class BlockView(TokenView):
    """The cache of blocks of one layer: an entry is written when the last token of its block arrives."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame, slots: Slots, rows: Tensor) -> None:
        """`frame` reads what is stored after this step; `rows` (rows,) are the rows of this step."""
        super().__init__(stores, frame)
        self.slots, self.rows = slots, rows

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """Write new blocks (…, b, *axes), whose order is their index in the sequence. Returns all blocks."""
        self._write(layout.once("block slots", lambda: self._slots_of(layout)), new)
        return self.stored()

    def _slots_of(self, layout: TokenLayout) -> Tensor:
        each = self.rows[layout.row] if layout.row is not None else self.rows[:, None]
        return torch.where(layout.real, self.slots.slot(each, layout.order), self.slots.total).flatten()


class SequenceView:
    """The recurrent state of one layer: read before the tokens of a step, written after them."""

    def __init__(self, stores: Sequence[Tensor], rows: Tensor | None) -> None:
        """`rows` (rows,) are the rows of this step; None: all, in order."""
        self.stores, self.rows = stores, rows

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x unchanged, and the state (rows, *axes) of each row. Where a document begins, the mixer ignores it."""
        return x, tuple(store[:-1] if self.rows is None else store[self.rows] for store in self.stores)

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Write the state (rows, *axes) of each row; returns y unchanged."""
        for store, values in zip(self.stores, new, strict=True):
            if self.rows is None:
                store[:-1] = values
            else:
                store[self.rows] = values.to(store.dtype)
        return y
