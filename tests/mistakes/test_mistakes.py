"""Common mistakes and what the user reads: each message is the stored one, and one of Python writes no flag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from common_mistakes import message_of, stored, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    write_files(path)
    return path


@pytest.mark.parametrize("row", stored(), ids=lambda row: row["mistake"])
def test_the_message_of_a_mistake(row: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    message = message_of(row["mistake"]).replace(str(folder), "CWD")
    assert message == row["today"]
    assert message != "no error"
    if not row["mistake"].startswith("dovetail "):
        assert not re.search(r"(?<![\w-])--?[a-z]", message), "a flag in a message of Python"
        assert not re.match(r"(TypeError|KeyError|IndexError|ValueError):", message), "not an error that is raised on purpose"


def test_every_mistake_stands_once_with_both_messages() -> None:
    rows = stored()
    assert len({row["mistake"] for row in rows}) == len(rows) >= 60
    assert all(row["before"] and row["today"] for row in rows)
