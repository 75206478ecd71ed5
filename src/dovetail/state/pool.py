"""Pool: the decode state of a model (KV caches, recurrent states), allocated from the declarations of its parts (`state()`).

    pool = Pool(spec, rows=8, capacity=4096)
    step = pool.step([0, 1], [5, 3])          # 5 and 3 new tokens for rows 0 and 1: their layout, and a view per layer
    logits = model(tokens, Ctx(layout=step.layout, views=step.views))

    pool = Pool(spec, rows=8, capacity=4096, coords=3)
    step = pool.step([0, 1], [5, 3], positions=[image, None])     # coordinates (5, 3) of row 0; text in row 1 (coordinates.py)

States of equal window share one layout of slots and one frame per step. `rollback` returns a row to an earlier length. Where
earlier entries have been overwritten (a ring that wrapped, a recurrent state) it returns to the last `mark`; it reports the
length it reached, and the caller replays the tokens from there. A step that is refused changes nothing.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.base.keywords import checks_keywords
from dovetail.nn.layout import Known, TokenLayout
from dovetail.nn.module import stored_dtype
from dovetail.spec.part import Part, walk
from dovetail.state.attended import AttendedView, Kept, bookkeeping
from dovetail.state.coordinates import Coordinates, Given
from dovetail.state.frame import BlockView, Frame, SequenceView, SharedView, SourceView, TokenView, make_frame
from dovetail.state.quantized import CacheFormat, QuantizedView, entry_format, entry_stores
from dovetail.state.slots import Contiguous, Copies, Paged, Ring, Single, Slots

Layout = Literal["contiguous", "paged", "ring"]


@dc.dataclass
class Group:
    """States that share a layout: one set of slots, and the stores of every layer."""

    slots: Slots
    per: str  # token, block, sequence or source
    block: int  # tokens per entry
    stores: dict[tuple[int, str], list[Tensor]]  # (layer, branch) -> tensors (slots + 1, *axes)
    coords: Tensor | None = None  # (slots + 1, c) the coordinates of the tokens, where the pool stores them

    def entries(self, lengths: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token counts as entry counts: those there are, and those `new` tokens add."""
        if self.block == 1:
            return list(lengths), list(new)
        before = [length // self.block for length in lengths]
        return before, [(length + n) // self.block - b for length, n, b in zip(lengths, new, before, strict=True)]

    def check(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
        """Raise StateError unless new[i] more tokens of row rows[i] fit, for all rows together."""
        self.slots.check(rows, *self.entries(lengths, new))

    def reserve(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
        """Make room for them."""
        self.copy(self.slots.reserve(rows, *self.entries(lengths, new)))

    def copy(self, copies: Copies) -> None:
        """Copy entries from slots to slots, in every layer."""
        if copies[0]:
            for store in self.tensors():
                store[torch.tensor(copies[1], device=store.device)] = store[torch.tensor(copies[0], device=store.device)]

    def row_slots(self, row: int) -> slice:
        """The slots of one row, where a row is a slice."""
        stride = self.slots.stride
        assert stride is not None
        return slice(row * stride, (row + 1) * stride)

    def tensors(self) -> Iterator[Tensor]:
        """Every store."""
        for stores in self.stores.values():
            yield from stores
        if self.coords is not None:
            yield self.coords


@dc.dataclass
class Step:
    """The layout of the new tokens, and the views of each layer by branch."""

    layout: TokenLayout
    views: list[dict[str, Any]]


@dc.dataclass(frozen=True)
class Mark:
    """A saved point of a row: its lengths, and the entries of the row in every store whose entries are overwritten."""

    length: int
    written: int
    entries: list[Tensor]


@checks_keywords
class Pool:
    """The decode state of `rows` sequences of up to `capacity` tokens."""

    def __init__(
        self,
        spec: Part,
        rows: int,
        capacity: int,
        *,
        layout: Layout = "contiguous",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        source: int = 0,
        page: int = 16,
        pages: int | None = None,
        slack: int = 8,
        sharded: Mapping[str, int] | None = None,
        coords: int = 0,
        drafts: bool = False,
        cache: CacheFormat | None = None,
        attended: int | None = None,
    ) -> None:
        """Allocate every store.

        layout: "ring" gives layers with a window a ring of keep + window + slack entries; other layers are then contiguous.
        source: tokens of encoder output per row. pages: how many pages of `page` tokens there are; by default, enough for all
        rows. sharded: axes that are sharded across ranks, and the number of ranks. coords: coordinates per token, where steps
        are given positions; 0: the position of a token is its order. drafts: for multi-token prediction, whose views are per
        depth, instead of the layers; drafting has lengths of its own, which roll back apart. cache: the format in which entries
        per token are stored (`state/quantized.py`); None: in `dtype`. attended: the entries of a KV cache whose layer has no
        window, or a larger one; the least attended is evicted (`state/attended.py`). None: nothing is evicted.
        """
        self.rows, self.device = rows, device
        self.cache: CacheFormat | None = cache
        self.lengths = [0] * rows  # tokens per row
        self.written = [0] * rows  # largest length of a row since its stores were new or restored
        self.source_lengths = [0] * rows  # tokens of encoder output per row
        self.marks: list[list[Mark]] = [[] for _ in range(rows)]
        self.coordinates = Coordinates(rows, coords) if coords else None
        self.groups: dict[Any, Group] = {}
        self.shared: dict[tuple[int, str], tuple[int, str]] = {}  # mixers that read the cache of an earlier one
        self.layers = self.ahead = 0
        for path, part, scope in walk(spec):
            if not scope.decodes or scope.drafts != drafts:
                continue
            if scope.stack:
                self.layers = scope.depth
            for state in part.state(scope):
                branch = path.rpartition(".")[2]
                self.ahead = max(self.ahead, state.ahead)
                if state.same_as is not None:
                    *_, layer, owner = state.same_as.split(".")
                    self.shared[scope.layer, branch] = (int(layer), owner)
                    continue
                ring = layout == "ring" and state.per == "token" and state.window is not None
                wide = state.per == "token" and (state.window is None or state.keep + state.window > (attended or 0))
                evicts = attended if wide else None
                key = (state.per, state.block, (state.window, state.keep) if ring and evicts is None else None, evicts)
                if key not in self.groups:
                    slots = self._slots(key, capacity, layout, source, page, pages, slack)
                    shape = (slots.total + 1, coords) if coords and state.per == "token" else None
                    places = None if shape is None else torch.zeros(shape, dtype=torch.long, device=device)
                    self.groups[key] = Group(slots, state.per, state.block, {}, places)
                group = self.groups[key]
                shape, stored = state.shape(scope, sharded or {}), stored_dtype(state, dtype)
                stores: list[Tensor] = []
                for _ in range(state.copies):
                    if cache is not None and state.per == "token" and stored == dtype:
                        stores += entry_stores(entry_format(cache, shape[-1]), group.slots.total + 1, shape, device)
                    else:
                        stores.append(torch.zeros(group.slots.total + 1, *shape, dtype=stored, device=device))
                stores += [] if evicts is None else bookkeeping(group.slots.total + 1, dtype, device)
                group.stores.setdefault((scope.layer, branch), []).extend(stores)
        # blocks last: their view is a part of the view of the layer's tokens
        self.ordered = sorted(self.groups.values(), key=lambda group: group.per == "block")
        self.growing = [group for group in self.ordered if group.per in ("token", "block")]

    def _slots(self, key: Any, capacity: int, layout: Layout, source: int, page: int, pages: int | None, slack: int) -> Slots:
        per, block, window, attended = key
        if attended is not None:
            return Kept(self.rows, attended)
        if per == "source":
            return Contiguous(self.rows, source)
        if per == "block":
            return Contiguous(self.rows, capacity // block)
        if per == "sequence":
            return Single(self.rows)
        if window is not None:
            return Ring(self.rows, window[0], window[1], slack)
        return Paged(self.rows, capacity, page, pages, self.device) if layout == "paged" else Contiguous(self.rows, capacity)

    def bytes(self) -> int:
        """Bytes of every store, without the slots for padding."""
        return sum(t[:-1].nbytes for group in self.groups.values() for t in group.tensors())

    # -- steps

    def step(self, rows: Sequence[int], new: Sequence[int], flat: bool = False, positions: Given | None = None) -> Step:
        """Room and views for new[i] more tokens of row rows[i], as a batch padded on the right or as one flat row of tokens.

        new[i] may be 0. positions[i] are the coordinates (new[i], coords) of row rows[i]; None: they continue those before.
        Raises StateError, and changes nothing, where the tokens of any row do not fit.
        """
        self._check_rows(rows, new)
        if not sum(new):
            raise StateError("the step has no new token (give at least one row a token)")
        if positions is not None:
            if self.coordinates is None:
                raise StateError("the pool stores no coordinates (make it with `coords`, the number of them per token)")
            self.coordinates.check(new, positions)
        lengths = list(map(self.lengths.__getitem__, rows))
        for row, length, n in zip(rows, lengths, new, strict=True):
            if n and 0 < length < self.ahead:
                what = f"row {row} holds {length} tokens, and the first {self.ahead} of a row see each other"
                raise StateError(f"{what} (roll it back to 0, and give it {self.ahead} or more in one step)")
        for group in self.growing:  # all groups, before any of them changes
            group.check(rows, lengths, new)
        for group in self.growing:
            group.reserve(rows, lengths, new)
        layout = _layout(lengths, new, flat, self.device)
        if self.coordinates is not None:
            layout = layout.at(self.coordinates.of(rows, new, layout, positions))
            self.coordinates.append(rows, lengths, positions or [None] * len(rows))
        views: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        for group in self.ordered:
            for (layer, branch), view in self._views(group, layout, rows, lengths, new, flat):
                if group.per == "block":
                    views[layer][branch].blocks = view
                else:
                    views[layer][branch] = view
        for (layer, branch), (owner, its) in self.shared.items():
            views[layer][branch] = SharedView(views[owner][its])
        for row, n in zip(rows, new, strict=True):
            self.lengths[row] += n
            self.written[row] = max(self.written[row], self.lengths[row])
        return Step(layout, views)

    def _views(
        self, group: Group, layout: TokenLayout, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int], flat: bool
    ) -> list[tuple[tuple[int, str], Any]]:
        """((layer, branch), view) of one group in this step."""
        if group.per == "sequence":
            index = None if list(rows) == list(range(self.rows)) else self._index(rows)
            return [(place, SequenceView(stores, index)) for place, stores in group.stores.items()]
        if group.per == "source":
            frame = self._read_frame(group, rows, [self.source_lengths[row] for row in rows], flat)
            return [(place, SourceView(stores, frame)) for place, stores in group.stores.items()]
        if group.per == "block":
            before, added = group.entries(lengths, new)
            frame = self._read_frame(group, rows, [b + a for b, a in zip(before, added, strict=True)], flat)
            index = self._index(rows)
            return [(place, BlockView(stores, frame, group.slots, index)) for place, stores in group.stores.items()]
        if isinstance(group.slots, Kept):
            budget = group.slots.budget
            return [(place, AttendedView(stores, budget, rows, lengths, new)) for place, stores in group.stores.items()]
        frame, cache = make_frame(group.slots, layout, rows, lengths, new, self.rows, group.coords), self.cache
        if cache is not None:
            return [(place, QuantizedView(stores, frame, cache)) for place, stores in group.stores.items()]
        return [(place, TokenView(stores, frame)) for place, stores in group.stores.items()]

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def _read_frame(self, group: Group, rows: Sequence[int], lengths: Sequence[int], flat: bool) -> Frame:
        """A frame that writes nothing and reads the first lengths[i] entries of row rows[i]."""
        nothing = [0] * len(rows)
        layout = TokenLayout.flat(nothing, device=self.device) if flat else TokenLayout.padded(nothing, 1, device=self.device)
        return make_frame(group.slots, layout, rows, lengths, nothing, self.rows)

    def admit(self, rows: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
        """Views that take the encoder output of new sequences: lengths[i] tokens for row rows[i], padded on the right."""
        self._check_rows(rows, lengths)
        nothing = [0] * len(rows)
        groups = [group for group in self.groups.values() if group.per == "source"]
        for group in groups:
            group.check(rows, nothing, lengths)
        views: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        layout = TokenLayout.padded(lengths, max(lengths), device=self.device)
        for group in groups:
            frame = make_frame(group.slots, layout, rows, nothing, lengths, self.rows)
            for (layer, branch), stores in group.stores.items():
                views[layer][branch] = TokenView(stores, frame)
            for row, n in zip(rows, lengths, strict=True):
                self.source_lengths[row] = n
        for group in self.groups.values():
            if group.per == "sequence":  # a recurrent state may start from the encoder output
                for (layer, branch), stores in group.stores.items():
                    views[layer][branch] = SequenceView(stores, self._index(rows))
        return views

    def _check_rows(self, rows: Sequence[int], counts: Sequence[int] | None = None) -> None:
        for row in rows:
            if not 0 <= row < self.rows:
                raise StateError(f"row {row} is not in the pool; its rows are 0 to {self.rows - 1}")
        if counts is None:
            return
        if not rows or len(rows) != len(counts) or min(counts) < 0:
            raise StateError(f"rows {list(rows)}, tokens {list(counts)}: give each row a count of tokens, 0 or more")
        if len(set(rows)) < len(rows):
            raise StateError(f"rows {list(rows)}: a row is listed twice (give it all its new tokens at once)")

    # -- returning to an earlier length, and forking

    def mark(self, row: int) -> None:
        """Save this point of a row, so that `rollback` can return to it exactly. Costs nothing where it always can."""
        self._check_rows([row])
        entries = [store[group.row_slots(row)].clone() for group in self._overwritten() for store in group.tensors()]
        if entries:
            self.marks[row].append(Mark(self.lengths[row], self.written[row], entries))

    def rollback(self, row: int, n: int) -> int:
        """Forget all but the first n tokens of a row. Returns the length reached, at most n; replay the tokens from there."""
        self._check_rows([row])
        length = self.lengths[row]
        if not 0 <= n <= length:
            raise StateError(f"row {row} holds {length} tokens; it cannot return to length {n}")
        n = 0 if n < min(self.ahead, length) else n  # no token can follow a part of the tokens that see each other
        groups = [group for group in self.groups.values() if group.per != "source"]
        exact = all(group.slots.can_rewind(length, self.written[row], n) for group in groups)
        reached = n if exact else self._to_mark(row, n)
        for group in groups:
            group.slots.rewind(row, reached // group.block)
        if reached == 0:
            self.written[row] = 0
        self.marks[row] = [mark for mark in self.marks[row] if mark.length <= reached]
        self.lengths[row] = reached
        if self.coordinates is not None:
            self.coordinates.rewind(row, reached)
        return reached

    def _to_mark(self, row: int, n: int) -> int:
        """Restore the last mark at or before n, or the empty row where there is none. Returns its length."""
        marks = [mark for mark in self.marks[row] if self.ahead <= mark.length <= n]
        if not marks:
            return 0
        stores = [(group, store) for group in self._overwritten() for store in group.tensors()]
        for (group, store), saved in zip(stores, marks[-1].entries, strict=True):
            store[group.row_slots(row)] = saved
        self.written[row] = marks[-1].written
        return marks[-1].length

    def fork(self, a: int, b: int) -> None:
        """Let row b continue from where row a is. From then on neither row sees the other's tokens."""
        self._check_rows([a, b])
        if a == b:
            return
        for group in self.groups.values():
            length = self.source_lengths[a] if group.per == "source" else self.lengths[a]
            group.copy(group.slots.fork(a, b, length // group.block))
        for per_row in (self.lengths, self.written, self.source_lengths):
            per_row[b] = per_row[a]
        self.marks[b] = list(self.marks[a])
        if self.coordinates is not None:
            self.coordinates.fork(a, b)

    def free(self, row: int) -> None:
        """End a sequence: the row is empty, and its pages are free."""
        self.rollback(row, 0)
        self.source_lengths[row] = 0
        self.marks[row] = []

    def reset(self) -> None:
        """End all sequences, whatever state an interrupt left the pool in; nobody holds a page afterwards."""
        for per_row in (self.lengths, self.written, self.source_lengths):
            per_row[:] = [0] * self.rows
        self.marks[:] = [[] for _ in range(self.rows)]
        for group in self.groups.values():
            group.slots.reset()
        if self.coordinates is not None:
            for row in range(self.rows):
                self.coordinates.rewind(row, 0)

    def _overwritten(self) -> list[Group]:
        return [group for group in self.groups.values() if group.slots.overwrites]


def _layout(lengths: Sequence[int], new: Sequence[int], flat: bool, device: torch.device | str | None) -> TokenLayout:
    """The layout of new[i] tokens behind the lengths[i] tokens of each row."""
    if flat:
        return TokenLayout.flat(new, lengths, device)
    if len(set(lengths)) == 1 and len(set(new)) == 1:
        return TokenLayout.whole(len(lengths), new[0], device, start=lengths[0])
    layout = TokenLayout.padded(new, max(new), device=device)
    before = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
    known = Known((1,) * len(new), max(length + n for length, n in zip(lengths, new, strict=True)))
    return TokenLayout.of(torch.where(layout.real, layout.order + before, 0), layout.seg, known=known)
