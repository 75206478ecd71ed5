"""Every planted bug applies to the sources as they are, changes its file, and leaves it parsable."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as planted
from bugs import BUGS, Bug
from fresh import FRESH
from fresh_two import FRESH_TWO
from lab_statistics import STATISTICS


@pytest.mark.parametrize("bug", [*BUGS, *FRESH, *FRESH_TWO, *STATISTICS], ids=lambda bug: f"{bug.room}-{bug.function}")
def test_a_planted_bug_applies(bug: Bug) -> None:
    path, text = planted.place(bug)
    assert text != path.read_text(encoding="utf-8")
    ast.parse(text)
    assert planted.fitting_tests(bug, planted.ROOT), "no test fits its room"


def test_there_are_sixty_and_half_in_the_rooms_with_state() -> None:
    assert len(BUGS) == len({(bug.function, bug.new, bug.old) for bug in BUGS}) == 60
    assert sum(bug.room in ("serving", "text", "data", "state") for bug in BUGS) >= 30


def test_half_of_the_fresh_bugs_are_in_rooms_that_laws_reach() -> None:
    every = {(bug.function, bug.new, bug.old) for bugs in planted.SETS.values() for bug in bugs}
    assert len(every) == sum(map(len, planted.SETS.values()))
    for bugs in (FRESH, FRESH_TWO):
        assert len(bugs) == 20
        assert sum(bug.room in planted.LAWS for bug in bugs) >= 11
