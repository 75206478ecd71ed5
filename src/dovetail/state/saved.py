"""Points of a row that other rows can continue from, for prefix caching.

    pages = pages_of(pool, row)                     the pages of its KV cache; one that is full is never written again
    states = snapshot(pool, row)                    copies of the states that later tokens overwrite or extend
    restore(pool, other, length, pages, states)     the other row continues from there, and shares the pages

Pages belong to as many users as hold them: rows, and caches of prefixes (`Paged.hold`). Any state can be saved: a recurrent
state, the keys of a window, a cache of blocks. The encoder output of an encoder–decoder is not a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.state.pool import Group, Pool
from dovetail.state.slots import Paged


def paged_slots(pool: Pool) -> Paged | None:
    """The pages of the KV cache; None where no layer has one (recurrent models)."""
    found = [group.slots for group in pool.groups.values() if isinstance(group.slots, Paged)]
    return found[0] if found else None  # states per token have one layout


def pages_of(pool: Pool, row: int) -> list[int]:
    """The pages that hold the tokens of a row, in order; the last may be filled in part."""
    slots = paged_slots(pool)
    return [] if slots is None else list(slots.owned[row])


def keeps_states(pool: Pool) -> bool:
    """Whether a snapshot has any tensor: whether some state does not lie in pages."""
    return any(True for _ in _unpaged(pool))


def snapshot(pool: Pool, row: int) -> list[Tensor]:
    """Copies of all states of a row that do not lie in pages."""
    length = pool.lengths[row]
    return [store[_used(group, row, length)].clone() for group in _unpaged(pool) for store in group.tensors()]


def restore(pool: Pool, row: int, length: int, pages: Sequence[int], states: Sequence[Tensor]) -> None:
    """Let an empty row hold the first `length` tokens of the row that these pages and states were taken from."""
    if pool.lengths[row]:
        raise StateError(f"row {row} holds {pool.lengths[row]} tokens (free it first)")
    slots = paged_slots(pool)
    if slots is not None:
        slots.adopt(row, pages)
    places = [(store, _used(group, row, length)) for group in _unpaged(pool) for store in group.tensors()]
    for (store, where), entries in zip(places, states, strict=True):
        store[where] = entries
    pool.lengths[row] = pool.written[row] = length
    pool.marks[row] = []


def _unpaged(pool: Pool) -> list[Group]:
    return [group for group in pool.groups.values() if group.per != "source" and not isinstance(group.slots, Paged)]


def _used(group: Group, row: int, length: int) -> slice:
    """The slots of a row that hold its first tokens: a row is a slice, and they come first in it."""
    begin = group.row_slots(row).start
    return slice(begin, begin + len(group.slots.positions(length // group.block)))
