"""The log of `dovetail serve`, and the end of its engine: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_server import TEMPLATE
from real_server import write_directory


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory) -> Path:
    return write_directory(*trained, tmp_path_factory.mktemp("logged") / "model", TEMPLATE)


class Logged:
    """A server whose stderr is a file."""

    def __init__(self, process: subprocess.Popen[str], url: str, file: Path) -> None:
        self.process, self.url, self.file = process, url, file

    def engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"dovetail.api.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def complete(self, **fields: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}/v1/completions", json={"prompt": "the cat", "max_tokens": 5, **fields}, timeout=120)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@contextlib.contextmanager
def logged(directory: Path, file: Path, *flags: str) -> Iterator[Logged]:
    command = [sys.executable, "-m", "dovetail", "serve", str(directory), "--port=0", "--threads=1", "--json", *flags]
    with file.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"].removesuffix("/v1")
        try:
            yield Logged(process, url, file)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.slow
def test_c9_one_line_per_request(directory: Path, tmp_path: Path) -> None:
    with logged(directory, tmp_path / "log", "--log-format=json") as server:
        answer = server.complete(ignore_eos=True)
        assert answer.status_code == 200
        streamed = server.complete(stream=True, n=2, ignore_eos=True)
        assert streamed.status_code == 200
        assert server.complete(max_tokens=-1).status_code == 400
        assert httpx2.get(f"{server.url}/no/such/route", timeout=60).status_code == 404
        assert httpx2.get(f"{server.url}/health", timeout=60).status_code == 200
    lines = [line for line in server.lines() if "route" in line]
    assert [(line["method"], line["status"]) for line in lines] == [("POST", 200), ("POST", 200), ("POST", 400), ("GET", 404)]
    first, second, bad, _ = lines
    assert first["request_id"] == answer.json()["id"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (answer.json()["usage"]["prompt_tokens"], 5)
    assert second["completion_tokens"] == 10
    assert 0 < first["first_token_seconds"] <= first["seconds"]
    assert first["route"] == "/v1/completions"
    assert "prompt_tokens" not in bad
    assert "the cat" not in server.file.read_text()
    assert all({"time", "level"} <= line.keys() for line in server.lines())


@pytest.mark.slow
def test_c9_prompts_are_logged_when_asked_for(directory: Path, tmp_path: Path) -> None:
    with logged(directory, tmp_path / "log", "--log-prompts") as server:
        assert server.complete(prompt="the cat\n\x1b[31m").status_code == 200
    text = server.file.read_text()
    assert "the cat" in text
    assert "\x1b" not in text
    assert "POST /v1/completions 200" in text


def flight(server: Logged, answers: list[httpx2.Response | Exception]) -> threading.Thread:
    def ask() -> None:
        try:
            answers.append(server.complete(max_tokens=3000, ignore_eos=True))
        except httpx2.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while 'num_requests_running{model_name="model"} 1.0' not in httpx2.get(f"{server.url}/metrics", timeout=60).text:
        time.sleep(0.02)
    return thread


@pytest.mark.slow
def test_c9_a_dead_engine_ends_the_server(directory: Path, tmp_path: Path) -> None:
    with logged(directory, tmp_path / "log", "--log-format=json") as server:
        answers: list[httpx2.Response | Exception] = []
        thread = flight(server, answers)
        os.kill(server.engine(), signal.SIGKILL)
        thread.join()
        assert server.process.wait(60) not in (0, None)
    (answer,) = answers
    assert isinstance(answer, httpx2.Response)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    text = server.file.read_text()
    assert "SIGKILL" in text
    assert "requests in flight: 1" in text
    assert '"status": 503' in text


@pytest.mark.slow
def test_c9_an_engine_is_started_again(directory: Path, tmp_path: Path) -> None:
    with logged(directory, tmp_path / "log", "--restart=1") as server:
        want = server.complete(temperature=0).json()["choices"][0]["text"]
        answers: list[httpx2.Response | Exception] = []
        thread = flight(server, answers)
        os.kill(server.engine(), signal.SIGKILL)
        thread.join()
        (answer,) = answers
        assert isinstance(answer, httpx2.Response)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        begin = time.monotonic()
        while (again := server.complete(temperature=0)).status_code == 503 and time.monotonic() - begin < 120:
            assert again.json()["error"]["code"] == "engine_restarting"
            time.sleep(0.2)
        assert again.json()["choices"][0]["text"] == want
        os.kill(server.engine(), signal.SIGKILL)  # the second time ends the server
        assert server.process.wait(60) not in (0, None)
    assert "the engine runs again" in server.file.read_text()
