"""Law 9: every seeded bug of adapters breaks it, and it holds without them."""

from __future__ import annotations

import pytest

from dovetail.lawbook.adapted import adapted
from dovetail.lawbook.case import Broken, Case
from dovetail.lawbook.seeded.adapted import mutants
from dovetail.lawbook.seeded.bug import Mutant


def test_there_is_a_bug_for_each_way_to_do_nothing() -> None:
    assert len(mutants()) >= 13


@pytest.mark.slow
@pytest.mark.parametrize("bug", mutants(), ids=lambda bug: bug.name)
def test_a_seeded_bug_breaks_the_law(bug: Mutant) -> None:
    adapted(Case(bug.spec, share=6))
    with bug.seed(), pytest.raises(Broken):
        adapted(Case(bug.spec))
