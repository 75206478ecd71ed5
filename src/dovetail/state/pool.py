"""Pool: all the decode memory of a model, allocated from what its parts declare, and nothing else.

    pool = Pool(spec, rows=8, capacity=4096)
    step = pool.step([0, 1], [5, 3])          # 5 and 3 new tokens for rows 0 and 1: where they stand, and a view a layer
    logits = model(tokens, Ctx(layout=step.layout, views=step.views))

States with an equal window share one layout and one frame a step. `mark` remembers a point to come back to where going back is
not exact (a ring that has wrapped, a recurrence); `rollback` says how far back it really got, and the caller replays the rest.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.core.errors import StateError
from dovetail.core.layout import TokenLayout
from dovetail.core.module import at_least_fp32
from dovetail.core.part import Part, walk
from dovetail.state.frame import BlockView, Frame, SequenceView, SourceView, TokenView, make_frame
from dovetail.state.slots import Contiguous, Copies, Paged, Ring, Single, Slots

Layout = Literal["contiguous", "paged", "ring"]


@dc.dataclass
class Group:
    """States that share a layout: one set of slots, the stores of every layer in it."""

    slots: Slots
    per: str  # token, block, sequence or source
    block: int  # tokens an entry stands for
    stores: dict[tuple[int, str], list[Tensor]]  # (layer, branch) -> tensors (slots + 1, *axes)

    def reserve(self, row: int, held: int, new: int) -> None:
        """Room for `new` more tokens of a row that holds `held`."""
        self.copy(self.slots.reserve(row, held // self.block, (held + new) // self.block - held // self.block))

    def back(self, row: int, held: int, n: int) -> int:
        """Forget all but the first n tokens; the number really reached."""
        reached = self.slots.back(row, held // self.block, n // self.block)
        return n if reached == n // self.block else reached * self.block

    def copy(self, copies: Copies) -> None:
        """Entries moved from slots to slots, in every layer."""
        if copies[0]:
            for store in self.tensors():
                store[torch.tensor(copies[1])] = store[torch.tensor(copies[0])]

    def tensors(self) -> Iterator[Tensor]:
        """Every store."""
        for stores in self.stores.values():
            yield from stores


@dc.dataclass
class Step:
    """One forward's worth: where the new tokens stand, and each layer's views by branch."""

    layout: TokenLayout
    views: list[dict[str, Any]]


class Pool:
    """The memory of `rows` sequences of up to `capacity` tokens."""

    def __init__(
        self,
        spec: Part,
        rows: int,
        capacity: int,
        *,
        layout: Layout = "contiguous",
        dtype: torch.dtype = torch.float32,
        source: int = 0,
        page: int = 16,
        pages: int | None = None,
        slack: int = 8,
        cut: Mapping[str, int] | None = None,
    ) -> None:
        """`layout` ring holds window layers in a ring of keep + window + slack; other layers are then contiguous. `source`
        is the room for an encoder's memory; `cut` the axes that ranks share out, and over how many."""
        self.rows, self.held = rows, [0] * rows
        self.sources = [0] * rows
        self.marks: list[list[tuple[int, list[Tensor]]]] = [[] for _ in range(rows)]
        self.groups: dict[Any, Group] = {}
        self.layers = 0
        for path, part, scope in walk(spec):
            states = part.state(scope)
            if scope.stack == "layers":
                self.layers = scope.depth
            for state in states:
                branch = path.rpartition(".")[2]
                ring = layout == "ring" and state.per == "token" and state.window is not None
                key = (state.per, state.block, (state.window, state.keep) if ring else None)
                if key not in self.groups:
                    slots = self._slots(key, capacity, layout, source, page, pages, slack)
                    self.groups[key] = Group(slots, state.per, state.block, {})
                group = self.groups[key]
                shape = [scope.size(axis) for axis in state.axes]
                shape[0] = max(1, shape[0] // (cut or {}).get(scope.names(state.axes)[0], 1))
                kept = at_least_fp32(dtype) if state.at_least_fp32 else dtype
                stores = [torch.zeros(group.slots.total + 1, *shape, dtype=kept) for _ in range(state.copies)]
                group.stores.setdefault((scope.layer, branch), []).extend(stores)

    def _slots(self, key: Any, capacity: int, layout: Layout, source: int, page: int, pages: int | None, slack: int) -> Slots:
        per, block, window = key
        if per == "source":
            return Contiguous(self.rows, source)
        if per == "block":
            return Contiguous(self.rows, capacity // block)
        if per == "sequence":
            return Single(self.rows)
        if window is not None:
            return Ring(self.rows, window[0], window[1], slack)
        return Paged(self.rows, capacity, page, pages) if layout == "paged" else Contiguous(self.rows, capacity)

    def bytes(self) -> int:
        """Bytes of every store, the bins left out."""
        return sum(t[:-1].nbytes for group in self.groups.values() for t in group.tensors())

    def step(self, rows: Sequence[int], new: Sequence[int], flat: bool = False) -> Step:
        """Room and views for new[i] more tokens of row rows[i]: a batch padded on the right, or one flat row of tokens."""
        self._known(*rows)
        if len(set(rows)) < len(rows):
            raise StateError(f"rows {list(rows)}: each may stand there once (give a row all its new tokens at once)")
        held = [self.held[row] for row in rows]
        if flat:
            layout = TokenLayout.flat(new, held)
        elif len(set(held)) == 1 and len(set(new)) == 1:
            layout = TokenLayout.whole(len(rows), new[0], start=held[0])
        else:
            layout = TokenLayout.padded(new, max(new))
            layout = TokenLayout.of(torch.where(layout.real, layout.order + torch.tensor(held)[:, None], 0), layout.seg)
        views: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        for group in sorted(self.groups.values(), key=lambda group: group.per == "block"):  # blocks last: they join tokens
            for (layer, branch), view in self._views(group, layout, rows, held, new, flat):
                if group.per == "block":
                    views[layer][branch].blocks = view
                else:
                    views[layer][branch] = view
        for row, n in zip(rows, new, strict=True):
            self.held[row] += n
        return Step(layout, views)

    def _views(
        self, group: Group, layout: TokenLayout, rows: Sequence[int], held: Sequence[int], new: Sequence[int], flat: bool
    ) -> Iterator[tuple[tuple[int, str], Any]]:
        """((layer, branch), view) of one group in this step."""
        if group.per == "sequence":
            picked = None if list(rows) == list(range(self.rows)) else torch.tensor(rows, dtype=torch.long)
            return ((place, SequenceView(stores, picked)) for place, stores in group.stores.items())
        if group.per == "source":
            frame = self._standing_frame(group, rows, [self.sources[row] for row in rows], flat)
            return ((place, SourceView(stores, frame)) for place, stores in group.stores.items())
        for row, h, n in zip(rows, held, new, strict=True):
            group.reserve(row, h, n)
        if group.per == "block":
            frame = self._standing_frame(group, rows, [(h + n) // group.block for h, n in zip(held, new, strict=True)], flat)
            picked = torch.tensor(rows, dtype=torch.long)
            return ((place, BlockView(stores, frame, group.slots, picked)) for place, stores in group.stores.items())
        frame = make_frame(group.slots, layout, rows, held, new, self.rows)
        return ((place, TokenView(stores, frame)) for place, stores in group.stores.items())

    def _known(self, *rows: int) -> None:
        for row in rows:
            if not 0 <= row < self.rows:
                raise StateError(f"row {row} is not one of the pool's {self.rows}")

    def admit(self, rows: Sequence[int], lengths: Sequence[int]) -> list[dict[str, Any]]:
        """Views into which the memory of a source (lengths[i] tokens for row rows[i], padded on the right) is put, once."""
        self._known(*rows)
        views: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        for group in self.groups.values():
            if group.per != "source":
                continue
            for row, n in zip(rows, lengths, strict=True):
                group.slots.reserve(row, 0, n)
                self.sources[row] = n
            layout = TokenLayout.padded(lengths, max(lengths))
            frame = make_frame(group.slots, layout, rows, [0] * len(rows), lengths, self.rows)
            for (layer, branch), stores in group.stores.items():
                views[layer][branch] = SourceView(stores, frame)
        return views

    def _standing_frame(self, group: Group, rows: Sequence[int], lengths: Sequence[int], flat: bool) -> Frame:
        """What is there when nothing new is written: lengths[i] entries of row rows[i]."""
        layout = TokenLayout.flat([0] * len(rows)) if flat else TokenLayout.padded([0] * len(rows), 1)
        return make_frame(group.slots, layout, rows, lengths, [0] * len(rows), self.rows)

    # -- going back, and going two ways

    def mark(self, row: int) -> None:
        """Remember this point of a row, where coming back to it would otherwise not be exact."""
        self._known(row)
        saved = [store[self._row_slots(group, row)].clone() for group in self._overwritten() for store in group.tensors()]
        if saved:
            self.marks[row].append((self.held[row], saved))

    def rollback(self, row: int, n: int) -> int:
        """Forget all but the first n tokens of a row; the number really reached, after which the rest must be replayed."""
        self._known(row)
        if not 0 <= n <= self.held[row]:
            raise StateError(f"row {row} holds {self.held[row]} tokens; it cannot go back to {n}")
        held = self.held[row]
        groups = [group for group in self.groups.values() if group.per != "source"]
        reached = min((group.back(row, held, n) for group in groups), default=n)
        if reached < n:
            reached = self._to_mark(row, n)
            for group in groups:
                group.back(row, held, reached)
        self.marks[row] = [mark for mark in self.marks[row] if mark[0] <= reached]
        self.held[row] = reached
        return reached

    def _to_mark(self, row: int, n: int) -> int:
        """Bring back the last mark at or before n; the very beginning where there is none."""
        point, saved = max((mark for mark in self.marks[row] if mark[0] <= n), key=lambda mark: mark[0], default=(0, []))
        places = [(group, store) for group in self._overwritten() for store in group.tensors()]
        for (group, store), old in zip(places, saved, strict=False):
            store[self._row_slots(group, row)] = old
        return point

    def fork(self, a: int, b: int) -> None:
        """Let row b go on from where row a is; neither sees what the other does from then on."""
        self._known(a, b)
        if a == b:
            return
        for group in self.groups.values():
            group.copy(group.slots.fork(a, b, (self.sources[a] if group.per == "source" else self.held[a]) // group.block))
        self.held[b], self.sources[b] = self.held[a], self.sources[a]
        self.marks[b] = list(self.marks[a])

    def free(self, row: int) -> None:
        """End a sequence: its memory is for others."""
        self.rollback(row, 0)
        self.sources[row] = 0

    def _overwritten(self) -> list[Group]:
        return [group for group in self.groups.values() if group.slots.overwrites]

    def _row_slots(self, group: Group, row: int) -> slice:
        stride = group.slots.stride
        assert stride is not None
        return slice(row * stride, (row + 1) * stride)
