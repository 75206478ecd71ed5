"""Slots: where the entry of a token lies in a store. Four layouts, each arithmetic on (row, position) -> slot.

    contiguous   row · capacity + position                              a row is a slice of the store
    paged        table[row, position // page] · page + position % page  pages are taken on demand and shared after a fork
    ring         the first `keep` positions, then (position − keep) mod (window + slack)    memory does not grow
    single       row                                                    one entry per sequence, which every token overwrites

A store has one slot more than `total`: padding writes to that last slot, and empty places read from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.state.pages import Scratch

Copies = tuple[list[int], list[int]]  # slots to copy from, slots to copy to
NO_COPIES: Copies = ([], [])


class Slots:
    """A layout: which slot each (row, position) has. `length` is the number of tokens a row holds."""

    total: int  # number of slots, without the one for padding
    stride: int | None = None  # slots per row, where a row is a slice
    overwrites: bool = False  # later tokens overwrite the entries of earlier ones, so that an exact rewind can need a mark

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        """The slot of each (row, position)."""
        raise NotImplementedError

    def page_table(self, rows: Sequence[int]) -> tuple[int, Tensor, Scratch] | None:
        """Where a row is made of pages: entries per page, the pages (rows, pages) of each row, as many as it may have, and
        memory to copy pages into."""
        return None

    def positions(self, length: int) -> Sequence[int]:
        """The positions that `length` tokens leave in the store; `range(length)` where none is overwritten."""
        return range(length)

    def check(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
        """Raise StateError unless new[i] more tokens of row rows[i] fit, for all rows together. Changes nothing."""

    def reserve(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> Copies:
        """Make room for new[i] more tokens of row rows[i], after `check`; returns the entries to copy before writing."""
        return NO_COPIES

    def can_rewind(self, length: int, written: int, n: int) -> bool:
        """Whether the first n of `length` tokens are intact, in a row where positions up to `written` have been written."""
        return True

    def rewind(self, row: int, n: int) -> None:
        """Free the slots of the tokens after the first n."""

    def fork(self, a: int, b: int, length: int) -> Copies:
        """Let row b hold the `length` tokens of row a; returns the entries to copy."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all rows, whatever state an interrupt left them in."""


class Contiguous(Slots):
    """A row is a slice of `capacity` slots."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity, self.total, self.stride = capacity, rows * capacity, capacity

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return row * self.capacity + position

    def check(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
        for row, length, n in zip(rows, lengths, new, strict=True):
            if length + n > self.capacity:
                raise StateError(
                    f"row {row} holds {length} of {self.capacity} entries; {n} more do not fit (make the pool larger)"
                )

    def fork(self, a: int, b: int, length: int) -> Copies:
        begin, to = a * self.capacity, b * self.capacity
        return list(range(begin, begin + length)), list(range(to, to + length))


class Paged(Slots):
    """Pages of one store, taken on demand. A fork shares them until one of the rows writes."""

    def __init__(
        self, rows: int, capacity: int, page: int, pages: int | None = None, device: torch.device | str | None = None
    ) -> None:
        self.page = page
        widest = self._pages(capacity)
        self.pages = rows * widest if pages is None else pages
        self.total = self.pages * page
        self.table = torch.zeros(rows, widest, dtype=torch.long, device=device)
        self.scratch = Scratch()
        self.reset()

    def reset(self) -> None:
        self.free, self.uses = list(range(self.pages))[::-1], [0] * self.pages
        self.kept: set[int] = set()  # pages that a cache of prefixes uses
        self.idle = 0  # of these, those that no row uses
        self.owned: list[list[int]] = [[] for _ in self.table]  # exactly the pages that the tokens of a row need

    def _pages(self, length: int) -> int:
        return -(-length // self.page)

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return self.table[row, position // self.page] * self.page + position % self.page

    def page_table(self, rows: Sequence[int]) -> tuple[int, Tensor, Scratch] | None:
        index = torch.tensor(rows, dtype=torch.long, device=self.table.device)
        return self.page, self.table.index_select(0, index), self.scratch

    def check(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
        needed, released = 0, Counter[int]()
        limit = self.table.shape[1] * self.page
        for row, length, n in zip(rows, lengths, new, strict=True):
            if length + n > limit:
                raise StateError(f"row {row} would hold {length + n} tokens; the limit is {limit} (make the pool larger)")
            needed += self._pages(length + n) - len(self.owned[row])
            if n and length % self.page:
                last = self.owned[row][-1]
                if self.uses[last] - released[last] > 1:  # the row writes to a copy, and the page has one user fewer
                    needed, released[last] = needed + 1, released[last] + 1
            if needed > len(self.free):
                raise StateError(
                    f"row {row}: the step needs {needed} or more pages, and {len(self.free)} of {self.pages} are free"
                    " (free a row, or make the pool larger)"
                )

    def reserve(self, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> Copies:
        read: list[int] = []
        write: list[int] = []
        for row, length, n in zip(rows, lengths, new, strict=True):
            owned, filled = self.owned[row], length % self.page
            if n and filled and self.uses[owned[-1]] > 1:  # write to a copy of the shared page
                old, own = owned[-1], self._take()
                self.drop(old)
                owned[-1] = own
                read += [old * self.page + i for i in range(filled)]
                write += [own * self.page + i for i in range(filled)]
            owned += [self._take() for _ in range(self._pages(length + n) - len(owned))]
            self.table[row, : len(owned)] = torch.tensor(owned, dtype=torch.long, device=self.table.device)
        return read, write

    def rewind(self, row: int, n: int) -> None:
        for page in self.owned[row][self._pages(n) :]:
            self.drop(page)
        del self.owned[row][self._pages(n) :]

    def fork(self, a: int, b: int, length: int) -> Copies:
        self.rewind(b, 0)
        self.owned[b] = list(self.owned[a])
        self.table[b] = self.table[a]
        for page in self.owned[a]:
            self.hold(page)
        return NO_COPIES

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Let a row that has no page share these."""
        assert not self.owned[row], "the row has pages"
        for page in pages:
            self.hold(page)
        self.owned[row] = list(pages)
        self.table[row, : len(pages)] = torch.tensor(self.owned[row], dtype=torch.long, device=self.table.device)

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Let a row use these as its first pages, which hold the same entries as its own."""
        owned = self.owned[row]
        for i, page in enumerate(pages):
            if owned[i] != page:
                self.hold(page)
                self.drop(owned[i])
                owned[i] = page
                self.table[row, i] = page

    def needed(self, row: int, length: int, n: int) -> int:
        """How many pages n more tokens of a row of this length take from those that are free."""
        copies = n > 0 and length % self.page > 0 and self.uses[self.owned[row][-1]] > 1
        return self._pages(length + n) - len(self.owned[row]) + copies

    def hold(self, page: int) -> None:
        """Add a row to the users of a page."""
        self.idle -= self.uses[page] == 1 and page in self.kept
        self.uses[page] += 1

    def drop(self, page: int) -> None:
        """Take a row from the users of a page; without users it is free."""
        self.uses[page] -= 1
        self.idle += self.uses[page] == 1 and page in self.kept
        if not self.uses[page]:
            self.free.append(page)

    def keep(self, page: int) -> None:
        """Add a cache of prefixes to the users of a page, which has another."""
        self.kept.add(page)
        self.uses[page] += 1

    def forget(self, page: int) -> None:
        """Take the cache of prefixes from the users of a page."""
        self.idle -= self.uses[page] == 1
        self.kept.remove(page)
        self.drop(page)

    def _take(self) -> int:
        page = self.free.pop()
        self.uses[page] = 1
        return page


class Ring(Slots):
    """The first `keep` tokens and the last `window + slack`; an exact rewind goes back `slack` tokens."""

    overwrites = True

    def __init__(self, rows: int, window: int, keep: int, slack: int) -> None:
        self.keep, self.turn, self.slack = keep, window + slack, slack
        self.size = self.stride = keep + self.turn
        self.total = rows * self.size

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        turned = self.keep + (position - self.keep) % self.turn
        return row * self.size + torch.where(position < self.keep, position, turned)

    def positions(self, length: int) -> Sequence[int]:
        if length <= self.size:
            return range(length)
        first = range(min(self.keep, length))
        return [*first, *range(max(len(first), length - self.turn), length)]

    def can_rewind(self, length: int, written: int, n: int) -> bool:
        # Not `length`: after a rewind the tokens from `length` to `written` still occupy the slots of earlier ones.
        return written - n <= self.slack or written <= self.size

    def fork(self, a: int, b: int, length: int) -> Copies:
        begin, to = a * self.size, b * self.size
        return list(range(begin, begin + self.size)), list(range(to, to + self.size))


class Single(Slots):
    """One entry per row. Only a mark leads back to an earlier token."""

    overwrites, stride = True, 1

    def __init__(self, rows: int) -> None:
        self.total = rows

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return row.expand_as(position)

    def positions(self, length: int) -> Sequence[int]:
        return range(min(length, 1))

    def can_rewind(self, length: int, written: int, n: int) -> bool:
        return n == length

    def fork(self, a: int, b: int, length: int) -> Copies:
        return [a], [b]
