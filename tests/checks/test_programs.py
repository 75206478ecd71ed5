"""The tester of programs (checks/programs): a failing program is found, shrunk and printed; a short run of each kind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from checks.programs import __main__ as command
from checks.programs.frame import Kind, Session, Step, run, sample, script, shrink, wrong
from checks.programs.kinds import KINDS, kind_of
from checks.programs.mutants import MUTANTS, Mutant, found, planted


class Stack(Session):
    """A list whose `pop` is wrong where an even number lies under another number above 5."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def do_push(self, value: int) -> None:
        self.items.append(value)

    def do_pop(self) -> None:
        if len(self.items) > 1 and self.items[-2] % 2 == 0 and self.items[-1] > 5:
            wrong(f"popped {self.items[-2]}")
        if self.items:
            self.items.pop()


class StackKind(Kind):
    name = "stack"

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        calls: list[Step] = [("push", {"value": rng.randrange(10)}) if rng.random() < 0.7 else ("pop", {}) for _ in range(30)]
        return {}, calls

    def start(self, setup: Mapping[str, Any]) -> Stack:
        return Stack()

    def smaller(self, step: Step) -> Iterator[Step]:
        if step[0] == "push" and step[1]["value"]:
            yield "push", {"value": step[1]["value"] - 1}


def test_a_failing_program_is_shrunk_to_the_steps_that_matter() -> None:
    kind = StackKind()
    programs = [sample(kind, 0, number) for number in range(50)]
    assert programs[3] == sample(kind, 0, 3)
    assert programs[3] != sample(kind, 1, 3)
    program, failure = next((one, why) for one in programs if (why := run(kind, one)) is not None)
    assert failure.error == "Wrong"
    small, why = shrink(kind, program, failure)
    assert small.steps == (("push", {"value": 0}), ("push", {"value": 6}), ("pop", {}))
    assert (why.step, why.message) == (2, "popped 0")
    printed = script(small, why)
    assert "('push', {'value': 6})" in printed
    compile(printed, "script", "exec")


def test_the_command_counts_failures_and_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "kind_of", lambda name: StackKind())
    assert command.main(["--kinds", "stack", "--programs", "40", "--failures", "2", "--json"]) == 1
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    assert rows["failed programs, stack"] == {
        "name": "failed programs, stack",
        "value": 2,
        "goal": "≤ 0",
        "holds": False,
        "spread": None,
    }
    assert err.count("replay('stack'") == 2


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SystemExit, match="'engin' is unknown"):
        command.main(["--kinds", "engin"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_short_run_of_each_kind_finds_nothing(name: str) -> None:
    kind = kind_of(name)
    for number in range(12):
        program = sample(kind, 0, number)
        failure = run(kind, program)
        assert failure is None, script(program, failure)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_mutant_is_stale(mutant: Mutant) -> None:
    with planted(mutant):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_bug_is_found_within_500_programs(mutant: Mutant) -> None:
    assert found(mutant) is not None
