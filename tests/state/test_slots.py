"""Layouts: arithmetic on (row, position) -> slot, and the accounts of pages."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import StateError
from dovetail.state.slots import NO_COPIES, Contiguous, Paged, Ring, Slots


def slots_of(slots: Slots, row: int, positions: list[int]) -> list[int]:
    return slots.slot(torch.tensor(row), torch.tensor(positions)).tolist()


# -- contiguous


def test_a_row_is_a_slice() -> None:
    slots = Contiguous(3, 10)
    assert (slots.total, slots.stride) == (30, 10)
    assert slots_of(slots, 2, [0, 9]) == [20, 29]
    assert slots.fork(0, 2, 3) == ([0, 1, 2], [20, 21, 22])
    assert slots.back(1, 9, 4) == 4


def test_a_full_row_says_how_full() -> None:
    slots = Contiguous(3, 10)
    assert slots.reserve(1, 7, 3) == NO_COPIES
    with pytest.raises(StateError, match="row 1 holds 8 of 10 tokens; 3 more do not fit"):
        slots.reserve(1, 8, 3)


# -- paged


def paged(pages: int | None = None) -> Paged:
    return Paged(rows=3, capacity=12, page=4, pages=pages)


def test_pages_are_taken_when_needed_and_given_back() -> None:
    slots = paged()
    assert len(slots.free) == 9
    slots.reserve(0, 0, 5)
    assert (len(slots.free), len(slots.owned[0])) == (7, 2)
    slots.reserve(0, 5, 3)  # fits the second page
    assert len(slots.free) == 7
    slots.reserve(0, 8, 1)
    assert len(slots.free) == 6
    assert slots.back(0, 9, 4) == 4
    assert (len(slots.free), len(slots.owned[0])) == (8, 1)
    slots.back(0, 4, 0)
    assert len(slots.free) == 9
    assert slots.uses == [0] * 9


def test_slots_of_different_rows_never_meet() -> None:
    slots = paged()
    for row in (0, 1, 0, 2, 1):  # interleaved, so that pages of a row lie apart
        slots.reserve(row, 4 * len(slots.owned[row]), 4)
    taken = [slot for row in range(3) for slot in slots_of(slots, row, list(range(4 * len(slots.owned[row]))))]
    assert len(taken) == len(set(taken)) == 20
    assert max(taken) < slots.total


def test_a_fork_shares_pages_until_one_side_writes() -> None:
    slots = paged()
    slots.reserve(0, 0, 6)
    assert slots.fork(0, 1, 6) == NO_COPIES
    shared = list(slots.owned[0])
    assert slots.owned[1] == shared
    assert [slots.uses[page] for page in shared] == [2, 2]
    assert len(slots.free) == 7  # not a page more
    read, write = slots.reserve(1, 6, 1)  # the second page is half full and shared: row 1 gets its own
    own = slots.owned[1][1]
    assert own not in shared
    assert (read, write) == ([shared[1] * 4, shared[1] * 4 + 1], [own * 4, own * 4 + 1])
    assert [slots.uses[page] for page in (*shared, own)] == [2, 1, 1]
    assert slots.reserve(0, 6, 1) == NO_COPIES  # row 0 is alone on its page again


def test_a_full_page_is_never_copied() -> None:
    slots = paged()
    slots.reserve(0, 0, 8)
    slots.fork(0, 1, 8)
    assert slots.reserve(1, 8, 1) == NO_COPIES
    assert slots.owned[1][:2] == slots.owned[0]


def test_all_pages_come_home() -> None:
    slots = paged()
    slots.reserve(0, 0, 7)
    slots.reserve(1, 0, 3)
    slots.fork(0, 1, 7)  # what row 1 held is given back
    slots.reserve(1, 7, 5)
    slots.fork(1, 2, 12)
    for row, held in ((0, 7), (2, 12), (1, 12)):
        slots.back(row, held, 0)
    assert sorted(slots.free) == list(range(9))
    assert slots.uses == [0] * 9


def test_no_page_left_and_a_row_too_long() -> None:
    slots = paged(pages=2)
    slots.reserve(0, 0, 8)
    with pytest.raises(StateError, match="no page is left for row 1"):
        slots.reserve(1, 0, 1)
    slots.back(0, 8, 4)
    slots.reserve(1, 0, 1)
    with pytest.raises(StateError, match="row 0 would hold 13 tokens, more than a row may"):
        paged().reserve(0, 0, 13)


# -- ring


def test_a_ring_keeps_the_first_and_the_last() -> None:
    slots = Ring(rows=2, window=5, keep=1, slack=3)
    assert (slots.stride, slots.total) == (9, 18)
    assert slots.positions(9) == range(9)
    assert list(slots.positions(10)) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(slots.positions(30)) == [0, *range(22, 30)]


def test_slots_of_a_ring() -> None:
    slots = Ring(rows=2, window=5, keep=1, slack=3)
    assert slots_of(slots, 1, [0, 1, 8, 9, 16, 17]) == [9, 10, 17, 10, 17, 10]  # the first token's slot is its own for ever
    for held in (9, 10, 17, 100):
        taken = slots_of(slots, 0, list(slots.positions(held)))
        assert len(set(taken)) == len(taken) == 9


@pytest.mark.parametrize(
    ("held", "to", "reached"),
    [
        (9, 2, 2),  # nothing has been overwritten yet
        (20, 17, 17),  # as far as the slack
        (20, 16, 0),  # one further: gone
    ],
)
def test_how_far_back_a_ring_goes(held: int, to: int, reached: int) -> None:
    assert Ring(rows=1, window=5, keep=1, slack=3).back(0, held, to) == reached


def test_what_a_ring_still_needs_after_going_back_is_there() -> None:
    slots = Ring(rows=1, window=5, keep=1, slack=3)
    for held in range(10, 40):
        for back in range(slots.slack + 1):
            n = held - back
            assert set(range(max(n - 4, 0), n)) <= set(slots.positions(held))  # the four before the next token, and itself
