"""dovetail verify: exit codes, a table for people, data for machines, a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build

SPEC = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}")


def asked(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", *arguments])
    return int(str(stopped.value.code or 0))


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    save(build(SPEC, seed=1), SPEC, tmp_path / "a")
    other = SPEC.set("layers.1.mixer.position.base", 500.0)
    save(build(other, seed=1), other, tmp_path / "b")
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_a_model_is_itself(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(two[0], two[0]) == 0
    assert "equal: the same function" in capsys.readouterr().out


def test_two_functions_are_told_apart(two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert asked(*two, "--json", "--html", str(page)) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["layer"], told["first"]) == ("structural", "layers.1", "layers.1.mixer.o.in")
    assert told["cause"]["name"] == "rope base"
    assert "500" in told["cause"]["description"]
    assert [tap["state"] for tap in told["taps"] if tap["address"].startswith("layers.0")] == ["equal"] * 14
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count('class="first"') == 1
    assert "rope base" in text


def test_the_table_marks_the_first_bad_tap(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(*two) == 1
    lines = capsys.readouterr().out.splitlines()
    (first,) = [line for line in lines if "← first" in line]
    assert first.split()[0] == "mixer.o.in"
    assert any(line.startswith("cause: rope base") for line in lines)


def test_ids_may_be_given_as_prompts(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(two[0], two[0], "--prompt", "3 14 15", "--prompt", "9 26 5", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prompts"], told["tokens"]) == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("none", "none"), 4, "no such directory"),
        (("http://localhost:1/v1", "none"), 4, "the second side only"),
        (("{a}", "{a}", "--prompt", "a text"), 3, "no side has a tokenizer"),
        (("{a}", "{a}", "--prompt", "99"), 3, "beyond the vocabulary"),
        (("{a}", "{a}", "--prompt=--"), 2, "--prompt: '--' cannot be its value"),
        (("{a}", "{a}", f"--prompt={'3 ' * 70_000}"), 3, "70,000 tokens; the limit is 65,536"),
        (("{a}", "{a}", "--map", "oops"), 4, "takes THEIRS=OURS"),
    ],
)
def test_errors_say_what_is_wrong(
    two: tuple[str, str], arguments: tuple[str, ...], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(*(text.format(a=two[0]) for text in arguments)) == code
    assert says in capsys.readouterr().err
