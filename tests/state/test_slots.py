"""Layouts of the decode state: (row, position) -> slot, and the bookkeeping of pages."""

from __future__ import annotations

import pytest
import torch

from dovetail.base.errors import StateError
from dovetail.state.slots import NO_COPIES, Contiguous, Paged, Ring, Slots


def slots_of(slots: Slots, row: int, positions: list[int]) -> list[int]:
    return slots.slot(torch.tensor(row), torch.tensor(positions)).tolist()


# -- contiguous


def test_a_row_is_a_slice() -> None:
    slots = Contiguous(3, 10)
    assert (slots.total, slots.stride) == (30, 10)
    assert slots_of(slots, 2, [0, 9]) == [20, 29]
    assert slots.fork(0, 2, 3) == ([0, 1, 2], [20, 21, 22])
    assert slots.can_rewind(9, 9, 4)


def test_the_error_of_a_full_row_has_its_length() -> None:
    slots = Contiguous(3, 10)
    slots.check([1], [7], [3])
    assert slots.reserve([1], [7], [3]) == NO_COPIES
    with pytest.raises(StateError, match="row 1 holds 8 of 10 entries; 3 more do not fit"):
        slots.check([1], [8], [3])


# -- paged


def paged(pages: int | None = None) -> Paged:
    return Paged(rows=3, capacity=12, page=4, pages=pages)


def test_pages_are_allocated_when_needed_and_freed() -> None:
    slots = paged()
    assert len(slots.free) == 9
    slots.reserve([0], [0], [5])
    assert (len(slots.free), len(slots.owned[0])) == (7, 2)
    slots.reserve([0], [5], [3])  # fits the second page
    assert len(slots.free) == 7
    slots.reserve([0], [8], [1])
    assert len(slots.free) == 6
    slots.rewind(0, 4)
    assert (len(slots.free), len(slots.owned[0])) == (8, 1)
    slots.rewind(0, 0)
    assert len(slots.free) == 9
    assert slots.uses == [0] * 9


def test_slots_of_different_rows_are_distinct() -> None:
    slots = paged()
    for row in (0, 1, 0, 2, 1):  # interleaved, so that pages of a row lie apart
        slots.reserve([row], [4 * len(slots.owned[row])], [4])
    taken = [slot for row in range(3) for slot in slots_of(slots, row, list(range(4 * len(slots.owned[row]))))]
    assert len(taken) == len(set(taken)) == 20
    assert max(taken) < slots.total


def test_a_fork_shares_pages_until_one_side_writes() -> None:
    slots = paged()
    slots.reserve([0], [0], [6])
    assert slots.fork(0, 1, 6) == NO_COPIES
    shared = list(slots.owned[0])
    assert slots.owned[1] == shared
    assert [slots.uses[page] for page in shared] == [2, 2]
    assert len(slots.free) == 7  # not a page more
    read, write = slots.reserve([1], [6], [1])  # the second page is half full and shared: row 1 gets its own
    own = slots.owned[1][1]
    assert own not in shared
    assert (read, write) == ([shared[1] * 4, shared[1] * 4 + 1], [own * 4, own * 4 + 1])
    assert [slots.uses[page] for page in (*shared, own)] == [2, 1, 1]
    assert slots.reserve([0], [6], [1]) == NO_COPIES  # row 0 is alone on its page again


def test_a_full_page_is_never_copied() -> None:
    slots = paged()
    slots.reserve([0], [0], [8])
    slots.fork(0, 1, 8)
    assert slots.reserve([1], [8], [1]) == NO_COPIES
    assert slots.owned[1][:2] == slots.owned[0]


def test_all_pages_come_home() -> None:
    slots = paged()
    slots.reserve([0], [0], [7])
    slots.reserve([1], [0], [3])
    slots.fork(0, 1, 7)  # what row 1 held is given back
    slots.reserve([1], [7], [5])
    slots.fork(1, 2, 12)
    for row in (0, 2, 1):
        slots.rewind(row, 0)
    assert sorted(slots.free) == list(range(9))
    assert slots.uses == [0] * 9


def test_no_page_left_and_a_row_too_long() -> None:
    slots = paged(pages=2)
    slots.reserve([0], [0], [8])
    with pytest.raises(StateError, match="row 1: the step needs 1 or more pages, and 0 of 2 are free"):
        slots.check([1], [0], [1])
    slots.rewind(0, 4)
    slots.check([1], [0], [1])
    slots.reserve([1], [0], [1])
    with pytest.raises(StateError, match="row 0 would hold 13 tokens; the limit is 12"):
        paged().check([0], [0], [13])


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
    ("written", "length", "to", "exact"),
    [
        (9, 9, 2, True),  # nothing has been overwritten
        (20, 20, 17, True),  # as far as the slack
        (20, 20, 16, False),  # one token further is overwritten
        (20, 18, 16, False),  # after a rewind from 20 to 18 the tokens 18 and 19 still occupy their slots
        (20, 18, 17, True),
    ],
)
def test_how_far_a_ring_can_rewind(written: int, length: int, to: int, exact: bool) -> None:
    assert Ring(rows=1, window=5, keep=1, slack=3).can_rewind(length, written, to) == exact


def test_a_ring_keeps_the_tokens_it_needs_after_a_rewind() -> None:
    slots = Ring(rows=1, window=5, keep=1, slack=3)
    for written in range(10, 40):
        for n in range(written + 1):
            if slots.can_rewind(written, written, n):  # the four tokens before the next one: the window counts that one
                assert set(range(max(n - 4, 0), n)) <= set(slots.positions(written))


# -- all rows of a step together


def test_a_check_counts_the_pages_of_all_rows() -> None:
    slots = paged(pages=2)
    slots.check([0, 1], [0, 0], [4, 4])
    with pytest.raises(StateError, match="row 1: the step needs 3 or more pages, and 2 of 2 are free"):
        slots.check([0, 1], [0, 0], [4, 5])
    assert len(slots.free) == 2


def test_both_rows_of_a_fork_that_write_need_one_copy_of_their_page() -> None:
    slots = paged(pages=3)
    slots.reserve([0], [0], [6])
    slots.fork(0, 1, 6)
    slots.check([0, 1], [6, 6], [2, 2])  # one page is free: row 0 takes it, and row 1 is then alone on the old one
    read, write = slots.reserve([0, 1], [6, 6], [2, 2])
    assert (len(read), len(write), len(slots.free)) == (2, 2, 0)
    assert not set(slots_of(slots, 0, [6, 7])) & set(slots_of(slots, 1, [6, 7]))
    assert slots.uses == [2, 1, 1]
