"""Where a token's entry lies: four layouts, each only arithmetic on (row, position) -> slot.

    contiguous   row · capacity + position                             a slice reads a row
    paged        table[row, position // page] · page + position % page pages are taken when needed, shared after a fork
    ring         the first `keep` positions, then (position − keep) mod (window + slack): memory that does not grow
    single       row                                                   one entry a sequence, which every token changes

One slot more than is counted is the bin: padding writes there and empty places read from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dovetail.core.errors import StateError

Copies = tuple[list[int], list[int]]  # slots to copy from and to
NO_COPIES: Copies = ([], [])


class Slots(Protocol):
    """A layout."""

    @property
    def total(self) -> int:
        """Slots, the bin not counted."""
        ...

    @property
    def stride(self) -> int | None:
        """Slots a row, where a row is a slice."""
        ...

    @property
    def overwrites(self) -> bool:
        """Whether entries are lost to later ones, so that going far back takes a mark."""
        ...

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        """The slot of each (row, position)."""
        ...

    def reserve(self, row: int, held: int, new: int) -> Copies:
        """Make room for `new` more tokens of a row that holds `held`; entries to copy before writing."""
        ...

    def positions(self, held: int) -> Sequence[int]:
        """The positions still there after `held` tokens; `range(held)` where nothing was let go."""
        ...

    def back(self, row: int, held: int, n: int) -> int:
        """Forget all but the first n tokens; the number really reached (less than n where they are gone)."""
        ...

    def fork(self, a: int, b: int, held: int) -> Copies:
        """Let row b hold what row a holds; entries to copy."""
        ...


class Contiguous:
    """A row is a slice."""

    overwrites = False

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity, self.total, self.stride = capacity, rows * capacity, capacity

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return row * self.capacity + position

    def reserve(self, row: int, held: int, new: int) -> Copies:
        if held + new > self.capacity:
            raise StateError(f"row {row} holds {held} of {self.capacity} tokens; {new} more do not fit (make the pool larger)")
        return NO_COPIES

    def positions(self, held: int) -> Sequence[int]:
        return range(held)

    def back(self, row: int, held: int, n: int) -> int:
        return n

    def fork(self, a: int, b: int, held: int) -> Copies:
        begin, to = a * self.capacity, b * self.capacity
        return list(range(begin, begin + held)), list(range(to, to + held))


class Paged:
    """Pages from one store, taken when needed; a fork shares them until one side writes."""

    overwrites = False

    def __init__(self, rows: int, capacity: int, page: int, pages: int | None = None) -> None:
        widest = -(-capacity // page)
        count = rows * widest if pages is None else pages
        self.page, self.total, self.stride = page, count * page, None
        self.free, self.uses = list(range(count))[::-1], [0] * count
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.table = torch.zeros(rows, widest, dtype=torch.long)

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return self.table[row, position // self.page] * self.page + position % self.page

    def reserve(self, row: int, held: int, new: int) -> Copies:
        owned, last = self.owned[row], held // self.page
        pages = max(len(owned), -(-(held + new) // self.page))
        shared = bool(new and held % self.page and self.uses[owned[last]] > 1)
        if pages > self.table.shape[1]:
            raise StateError(f"row {row} would hold {held + new} tokens, more than a row may (make the pool larger)")
        if pages - len(owned) + shared > len(self.free):  # all or nothing: a step that is refused changes nothing
            raise StateError(f"no page is left for row {row} (make the pool larger, or end a sequence)")
        copies = NO_COPIES
        if shared:  # write to a copy of it
            old, own = owned[last], self._take()
            self._drop(old)
            owned[last] = own
            filled = range(held % self.page)
            copies = [old * self.page + i for i in filled], [own * self.page + i for i in filled]
        owned += [self._take() for _ in range(pages - len(owned))]
        self.table[row, : len(owned)] = torch.tensor(owned, dtype=torch.long)
        return copies

    def positions(self, held: int) -> Sequence[int]:
        return range(held)

    def back(self, row: int, held: int, n: int) -> int:
        kept = -(-n // self.page)
        for page in self.owned[row][kept:]:
            self._drop(page)
        del self.owned[row][kept:]
        return n

    def fork(self, a: int, b: int, held: int) -> Copies:
        self.back(b, held, 0)
        self.owned[b] = list(self.owned[a])
        self.table[b] = self.table[a]
        for page in self.owned[a]:
            self.uses[page] += 1
        return NO_COPIES

    def _take(self) -> int:
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            self.free.append(page)


class Ring:
    """The first `keep` tokens and the last `window + slack`; exact roll-back as far as the slack."""

    overwrites = True

    def __init__(self, rows: int, window: int, keep: int, slack: int) -> None:
        self.keep, self.turn, self.slack = keep, window + slack, slack
        self.stride = keep + self.turn
        self.total = rows * self.stride

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        turned = self.keep + (position - self.keep) % self.turn
        return row * self.stride + torch.where(position < self.keep, position, turned)

    def reserve(self, row: int, held: int, new: int) -> Copies:
        return NO_COPIES

    def positions(self, held: int) -> Sequence[int]:
        if held <= self.stride:
            return range(held)
        first = range(min(self.keep, held))
        return [*first, *range(max(len(first), held - self.turn), held)]

    def back(self, row: int, held: int, n: int) -> int:
        return n if held - n <= self.slack or held <= self.stride else 0

    def fork(self, a: int, b: int, held: int) -> Copies:
        begin, to = a * self.stride, b * self.stride
        return list(range(begin, begin + self.stride)), list(range(to, to + self.stride))


class Single:
    """One entry a row; there is no way back but to a mark."""

    overwrites, stride = True, 1

    def __init__(self, rows: int) -> None:
        self.total = rows

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        return row.expand_as(position)

    def reserve(self, row: int, held: int, new: int) -> Copies:
        return NO_COPIES

    def positions(self, held: int) -> Sequence[int]:
        return range(min(held, 1))

    def back(self, row: int, held: int, n: int) -> int:
        return n if n == held else 0

    def fork(self, a: int, b: int, held: int) -> Copies:
        return [a], [b]
