"""A server as the second side: a real process that serves one of our models, in both forms of answer, right and wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import odd_servers
import pytest
import torch
from models import llama

from dovetail.base.errors import FileError
from dovetail.proof.compare.prompt import Prompt, random_prompt
from dovetail.proof.compare.server import ask, compare_server
from dovetail.proof.compare.sides import NativeSide
from dovetail.proof.http import Http

SERVER = Path(__file__).with_name("fake_server.py")


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
    side = NativeSide(place)
    assert side.spec is not None
    with serving(str(place), form) as url:
        found = compare_server(side, url, random_prompt(side.spec))
    assert found.status == "equal"
    assert len(found.rows) == 2
    assert all(row.ours == row.theirs and row.gap < 1e-4 for row in found.rows)


@pytest.mark.slow
def test_logits_that_are_scaled_wrongly_are_no_rounding(place: Path) -> None:
    side = NativeSide(place)
    assert side.spec is not None
    with serving(str(place), "openai", "1.5") as url:
        found = compare_server(side, url, random_prompt(side.spec))
    assert found.status == "structural"
    assert all(row.ours == row.theirs for row in found.rows)  # the first token alone would not have shown it
    assert min(row.gap for row in found.rows) > 0.1


def test_nobody_there_is_an_error_that_names_the_address(place: Path) -> None:
    side = NativeSide(place)
    assert side.spec is not None
    with pytest.raises(FileError, match=r"http://127\.0\.0\.1:9/v1/completions: the request failed"):
        compare_server(side, "http://127.0.0.1:9/v1", random_prompt(side.spec))


def test_only_the_web_is_asked(place: Path) -> None:
    side = NativeSide(place)
    assert side.spec is not None
    with pytest.raises(FileError, match="only http"):
        compare_server(side, "file:///etc", random_prompt(side.spec))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), "nan"])
def test_a_log_prob_that_is_not_finite_is_not_equal(place: Path, number: object) -> None:
    side = NativeSide(place)
    assert side.spec is not None
    prompt = random_prompt(side.spec, rows=1)
    best = compare_best(side, prompt)
    with odd_servers.serving(odd_servers.logprobs(best, (3 if best[0] != 3 else 4, number))) as url:
        verdict = compare_server(side, url, prompt)
    assert verdict.rows[0].ours == verdict.rows[0].theirs
    assert (verdict.status, verdict.failed) == ("non-finite", True)
    assert verdict.data()["rows"][0]["gap"] is None


def compare_best(side: NativeSide, prompt: Prompt) -> tuple[int, float]:
    with torch.no_grad():
        logits = side.forward(side.module(torch.float64), prompt)[0, -1].log_softmax(-1)
    return int(logits.argmax()), logits.max().item()


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
SEQUENCE = b"\x1b]0;dovetail: all is well\x07\x1b[2J \xc2\x9b31m"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "the request failed"),
        (b"nonsense\r\n\r\n", "the request failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "not JSON"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the request failed"),
        (odd_servers.reply(b"", "302 Found", "Location: ftp://127.0.0.1/x"), "redirects to ftp://127.0.0.1/x, which is not"),
        (odd_servers.reply(b"", "307 Temporary Redirect", "Location: http://127.0.0.1:1/v1"), "redirects to http"),
        (odd_servers.reply(b"x" * (2**20 + 1)), "longer than 1,048,576 bytes"),
        (odd_servers.reply(DEEP), "not JSON"),
        (odd_servers.reply(b"[1, 2]"), "not a JSON object"),
        (odd_servers.reply(b"{}"), "holds no log-probs"),
        (odd_servers.reply(b'{"choices": [{"logprobs": {"content": [{"token": 1, "logprob": null}]}}]}'), "holds no log-probs"),
        (odd_servers.reply(SEQUENCE, "500 Oops"), r"answered 500: \\x1b\]0;dovetail: all is well\\x07\\x1b\[2J \\x9b31m"),
    ],
)
def test_odd_answers_are_errors_without_control_characters(answer: bytes, problem: str) -> None:
    with odd_servers.serving(answer) as url, pytest.raises(FileError, match=problem) as refused:
        ask(url, [1, 2], None)
    assert str(refused.value).isprintable()


def test_a_server_that_drips_meets_a_deadline() -> None:
    begin = time.monotonic()
    with odd_servers.serving(odd_servers.drip) as url, pytest.raises(FileError, match=r"no whole answer within 0\.5 seconds"):
        Http(url, seconds=0.5).post("/completions", {})
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("url", ["http://[::1", "http://:80/v1", "ftp://host/v1", "http://a:99999/v1", "http://\u2100\ud800/"])
def test_odd_addresses_are_errors(url: str) -> None:
    with pytest.raises(FileError):
        ask(url, [1], None)


def test_control_characters_of_a_token_are_not_printed(place: Path) -> None:
    side = NativeSide(place)
    assert side.spec is not None
    body = {"choices": [{"logprobs": {"tokens": ["\x1b[2Jhello"], "token_logprobs": [-1.0], "top_logprobs": [{}]}}]}
    with odd_servers.serving(odd_servers.reply(json.dumps(body).encode())) as url:
        verdict = compare_server(side, url, random_prompt(side.spec, rows=1))
    assert verdict.rows[0].text == "\\x1b[2Jhello"
