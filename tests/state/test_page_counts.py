"""Random programs on pages: after every call, the counts of a paged store are those that its rows and cached prefixes give.

The counts are derived again from who uses a page: rows (`owned`) and the cache (`kept`). A step that fails changes nothing.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dovetail.base.errors import StateError
from dovetail.state.slots import Paged

ROWS, CAPACITY, PAGE = 4, 22, 4


def check(slots: Paged, lengths: list[int]) -> None:
    users = Counter(page for owned in slots.owned for page in owned)
    users.update(slots.kept)
    assert slots.uses == [users[page] for page in range(slots.pages)]
    assert sorted(slots.free) == [page for page in range(slots.pages) if not users[page]]
    rows = {page for owned in slots.owned for page in owned}
    assert slots.idle == len(slots.kept - rows), "pages that only the cache of prefixes uses"
    for row, length in enumerate(lengths):
        assert len(slots.owned[row]) == -(-length // slots.page)
        assert slots.table[row, : len(slots.owned[row])].tolist() == slots.owned[row]


def extend(slots: Paged, row: int, lengths: list[int], n: int) -> None:
    """One more step of a row: `needed` is what it takes from the free pages, and no page that another user has is written."""
    needed, free = slots.needed(row, lengths[row], n), len(slots.free)
    try:
        slots.check([row], [lengths[row]], [n])
    except StateError:
        assert needed > free or lengths[row] + n > slots.table.shape[1] * slots.page
        return
    slots.reserve([row], [lengths[row]], [n])
    assert free - len(slots.free) == needed
    written = {slots.owned[row][at // slots.page] for at in range(lengths[row], lengths[row] + n)}
    assert all(slots.uses[page] == 1 for page in written), "a shared page is written"
    lengths[row] += n


@pytest.mark.parametrize("seed", range(40))
def test_counts_follow_from_the_users_of_pages(seed: int) -> None:
    draw, lengths = random.Random(seed), [0] * ROWS
    slots = Paged(ROWS, CAPACITY, PAGE, pages=draw.choice([9, 14, None]))
    for _ in range(120):
        row, other = draw.sample(range(ROWS), 2)
        call = draw.choice(["extend", "extend", "extend", "rewind", "fork", "keep", "forget", "adopt"])
        if call == "extend":
            extend(slots, row, lengths, draw.randint(0, 7))
        elif call == "rewind":
            lengths[row] = draw.randint(0, lengths[row])
            slots.rewind(row, lengths[row])
        elif call == "fork":
            slots.fork(row, other, lengths[row])
            lengths[other] = lengths[row]
        elif call == "keep":  # whole pages alone are kept
            for page in slots.owned[row][: lengths[row] // PAGE]:
                if page not in slots.kept:
                    slots.keep(page)
        elif call == "forget" and slots.kept:
            slots.forget(draw.choice(sorted(slots.kept)))
        elif call == "adopt" and not lengths[row]:
            pages = draw.sample(sorted(slots.kept), min(len(slots.kept), 3))
            slots.adopt(row, pages)
            lengths[row] = len(pages) * PAGE
        check(slots, lengths)
