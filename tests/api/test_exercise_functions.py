"""dt.list_exercises and dt.check_exercise, and their verbs: the exercises of the book, as the wheel carries them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import dovetail as dt
from dovetail.cli import main

BOOK = Path(__file__).parents[2] / "docs/book"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*args])
    return int(ended.value.code or 0)


def test_every_exercise_is_listed_and_its_answer_is_right() -> None:
    by_chapter = yaml.safe_load((BOOK / "exercises.yaml").read_text(encoding="utf-8"))
    listed = dt.list_exercises()
    assert {one.chapter for one in listed} == set(by_chapter)
    for one in listed:
        place, number = one.number.split(".")
        stored = by_chapter[one.chapter][int(number) - 1]
        assert one.question == stored["ask"]
        assert dt.check_exercise(one.number, float(stored["answer"])).right
        assert dt.check_exercise(f"{one.chapter}.{number}", stored["answer"] + 2 * stored["within"] + 0.01).failed
        assert place.isdigit()


def test_chapters_are_counted_in_the_order_of_the_index() -> None:
    assert [dt.check_exercise(f"{i}.1").exercise.chapter for i in (1, 2)] == ["why_attention", "scaled_dot_products"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("99.1", r"99\.1: the book has no chapter 99; its last exercise is \d+\.\d+"),
        ("maks.1", r"maks\.1: the book has no chapter 'maks'; did you mean masks\?"),
        ("2.9", r"2\.9: chapter 2 has the exercises 2\.1 to 2\.3"),
        ("2", r"2: chapter 2 has the exercises 2\.1 to 2\.3"),
    ],
)
def test_an_exercise_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(dt.DovetailError, match=message):
        dt.check_exercise(name)


def test_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("learn", "--json") == 0
    assert {"number", "chapter", "question"} == set(json.loads(capsys.readouterr().out)[0])
    assert run("learn", "check", "2.2") == 0
    assert "With $d = 64$" in capsys.readouterr().out
    assert run("learn", "check", "2.2", "8") == 0
    assert "8 is right" in capsys.readouterr().out
    assert run("learn", "check", "2.2", "-3") == 1
    assert "-3 is not right" in capsys.readouterr().out
    assert run("learn", "check", "2.2", "eight") == 2
    assert run("learn", "check", "none.2") == 4
