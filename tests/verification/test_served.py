"""A server as the second side: a real process that serves one of our models, in both forms of answer, right and wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from models import llama

from dovetail.core.errors import FileError
from dovetail.verification.prompt import drawn
from dovetail.verification.served import compare
from dovetail.verification.sides import Ours

SERVER = Path(__file__).with_name("server.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("served"))[0]


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("openai"),
        pytest.param("llama.cpp", marks=pytest.mark.slow),
        pytest.param("strict", marks=pytest.mark.slow),
    ],
)
def test_the_same_model_served_is_equal(place: Path, form: str) -> None:
    side = Ours(place)
    assert side.spec is not None
    with serving(str(place), form) as url:
        found = compare(side, url, drawn(side.spec))
    assert found.word == "equal"
    assert len(found.rows) == 2
    assert all(row.ours == row.theirs and row.gap < 1e-4 for row in found.rows)


@pytest.mark.slow
def test_logits_that_are_scaled_wrongly_are_no_rounding(place: Path) -> None:
    side = Ours(place)
    assert side.spec is not None
    with serving(str(place), "openai", "1.5") as url:
        found = compare(side, url, drawn(side.spec))
    assert found.word == "structural"
    assert all(row.ours == row.theirs for row in found.rows)  # the first token alone would not have shown it
    assert min(row.gap for row in found.rows) > 0.1


def test_nobody_there_is_an_error_that_names_the_address(place: Path) -> None:
    side = Ours(place)
    assert side.spec is not None
    with pytest.raises(FileError, match=r"http://127\.0\.0\.1:9/v1/completions: could not be asked"):
        compare(side, "http://127.0.0.1:9/v1", drawn(side.spec))


def test_only_the_web_is_asked(place: Path) -> None:
    side = Ours(place)
    assert side.spec is not None
    with pytest.raises(FileError, match="only http"):
        compare(side, "file:///etc", drawn(side.spec))
