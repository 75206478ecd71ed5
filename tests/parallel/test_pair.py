"""Ranks that wait for jobs: answers in order, and an error for one that raises, dies or hangs."""

import pytest
from rank_jobs import fail_on, rank_and_sum

from dovetail.parallel.mesh import RankError
from dovetail.parallel.pair import Pair


def test_answers_come_in_rank_order(pair: Pair) -> None:
    assert pair.run(rank_and_sum, 10) == [(0, 21), (1, 21)]
    assert pair.run(rank_and_sum, 20) == [(0, 41), (1, 41)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout", "says"),
    [
        ("raise", 60.0, "fail_on: rank 1 raised"),
        ("die", 60.0, "fail_on: rank 1 died with exit code 7"),
        ("hang", 3.0, "no answer from rank 0, 1 within 3 s"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_job_starts_anew(how: str, timeout: float, says: str) -> None:
    with Pair() as ranks:
        old = [process.pid for process in ranks.processes]
        with pytest.raises(RankError, match=says):
            ranks.run(fail_on, 1, how, timeout=timeout)
        assert ranks.processes == []
        assert ranks.run(rank_and_sum, 1) == [(0, 3), (1, 3)]
        assert not set(old) & {process.pid for process in ranks.processes}
        last = list(ranks.processes)
        assert all(process.is_alive() for process in last)
    assert ranks.processes == []
