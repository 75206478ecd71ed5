"""Which rank did not arrive, from what all ranks answered."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from dovetail.parallel.heartbeat import Member, Status, missing, problem, stacks, stacks_of

MEMBERS = [Member(f"node-{i}", "", 100 + i) for i in range(12)]


def answers(*states: str) -> list[dict[str, Any]]:
    causes = {
        "waiting": "gloo:all_reduce number 7 of the group default_pg",
        "failed": "RuntimeError: x",
        "ended": "FileError: gone",
    }
    return [
        {"phase": "data", "step": 5, "seconds": 3.2, "state": state, "cause": causes.get(state, ""), "stacks": f"stack {i}\n"}
        for i, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["failed", "silent"], [1]),
        (["failed", "running", "waiting"], [1]),
        (["running", "failed", "silent"], [2]),  # the first rank is on its way
        (["ended", "running", "failed"], [0]),
        (["waiting", "failed"], []),
    ],
)
def test_a_rank_that_waits_is_not_the_cause(states: list[str], expected: list[int]) -> None:
    assert missing(answers(*states)) == expected


def test_the_line_names_rank_host_process_step_and_phase() -> None:
    line = problem(answers("failed", "running"), MEMBERS)
    assert line == ("rank 1 (node-1, process 101) did not arrive, step 5, phase data, for 3 s: runs outside every collective")
    silent = problem(answers("silent", "failed"), MEMBERS)
    assert silent.startswith("rank 0 (node-0, process 100) did not arrive, last seen at step 5, phase data: does not respond")
    assert "ended with FileError: gone" in problem(answers("failed", "ended"), MEMBERS)


def test_ranks_that_wait_for_each_other_are_reported_with_their_collectives() -> None:
    found = answers("waiting", "waiting")
    found[1]["cause"] = "gloo:broadcast number 7 of the group default_pg"
    line = problem(found, MEMBERS)
    assert "different collectives (gloo:all_reduce number 7 of the group default_pg; gloo:broadcast" in line
    assert "a link between them may be broken" in problem(answers("failed", "failed"), MEMBERS)


def test_only_some_of_many_missing_ranks_are_listed() -> None:
    line = problem(answers(*["silent"] * 12), MEMBERS)
    assert line.count("did not arrive") == 8
    assert line.endswith("and 4 more ranks")


def test_the_stacks_of_the_missing_rank_alone_are_shown() -> None:
    text = stacks_of(answers("failed", "running"), MEMBERS)
    assert text == "The stacks of rank 1 (node-1, process 101):\nstack 1\n"


def test_stacks_begin_with_the_main_thread() -> None:
    begun, ended = threading.Event(), threading.Event()

    def waits_in_a_thread() -> None:
        begun.set()
        ended.wait(10)

    thread = threading.Thread(target=waits_in_a_thread, name="reader")
    thread.start()
    begun.wait()
    text = stacks()
    ended.set()
    thread.join()
    assert text.startswith("Thread MainThread")
    assert sys._getframe().f_code.co_name in text.partition("Thread reader")[0]
    assert "in waits_in_a_thread" in text.partition("Thread reader")[2]


def test_a_status_counts_the_seconds_of_its_phase() -> None:
    status = Status()
    assert status.data()["step"] is None
    status.at("eval", 12)
    found = status.data()
    assert (found["phase"], found["step"]) == ("eval", 12)
    assert 0 <= found["seconds"] < 60
