"""Clients that go away or read slowly, a full queue, a dead engine, a drain."""

from __future__ import annotations

import json
import socket
import threading
import time

import openai
import pytest
from http_server import Served

GOOD = {"prompt": "the cat", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "the cat", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def opened(served: Served, body: dict) -> socket.socket:
    """A connection on which a request was sent."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.settimeout(60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a reader that waits soon fills it
    sock.connect(("127.0.0.1", served.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + data)
    return sock


def until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_its_request(start, stream: bool) -> None:
    served = start(pace=0.02)
    want = served.complete(**GOOD).json()["choices"]
    sockets = [opened(served, {**LONG, "stream": stream}) for _ in range(4)]
    until(lambda: len(served.engine.live) == 4 and served.engine.steps > 12)
    for sock in sockets:
        sock.close()
    until(lambda: not served.engine.live)
    assert len(served.engine.aborted) == 4
    assert served.complete(**GOOD).json()["choices"] == want
    assert 'finished_reason="abort"' in served.http.get("/metrics").text


@pytest.mark.slow
def test_slow_readers_hold_up_nobody(start) -> None:
    served = start()
    want = served.complete(**GOOD).json()["choices"]
    sockets = [opened(served, {**LONG, "max_tokens": 200, "stream": True, "logprobs": 20}) for _ in range(6)]
    until(lambda: not served.engine.live, 120)  # the engine is done with all of them, though nobody has read a byte
    assert served.complete(**GOOD).json()["choices"] == want
    for sock in sockets:
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += sock.recv(1 << 20)
        sock.close()


def test_a_full_queue_is_429_with_retry_after(start) -> None:
    served = start(room=1, pace=0.02)
    with opened(served, {**LONG, "stream": True}):
        until(lambda: served.engine.live)
        for stream in (True, False):
            answer = served.complete(**GOOD, stream=stream)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            served.openai.completions.create(model="tiny", prompt="x")
        assert served.complete(prompt=["a", "b"]).status_code == 429
    until(lambda: not served.engine.live)
    assert served.complete(**GOOD).status_code == 200


def test_a_dead_engine_is_503_and_an_error_in_mid_stream(start) -> None:
    served = start(pace=0.02)
    sock = opened(served, {**LONG, "stream": True})
    whole = opened(served, LONG)
    until(lambda: served.engine.steps > 6)
    served.engine.dead.set()
    data = b""
    while chunk := sock.recv(1 << 16):
        data += chunk
        if b"[DONE]" in data:
            break
    events = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
    assert b" 503 " in whole.recv(1 << 16)
    sock.close()
    whole.close()
    assert served.http.get("/health").status_code == 503
    answer = served.complete(**GOOD)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


def test_a_drain_finishes_what_is_in_flight_and_refuses_the_rest(start) -> None:
    served = start(pace=0.01)
    want = served.complete(**{**GOOD, "max_tokens": 40}).json()["choices"]
    answers: list = []
    runs = [threading.Thread(target=lambda: answers.append(served.complete(**{**GOOD, "max_tokens": 40}))) for _ in range(5)]
    for run in runs:
        run.start()
    until(lambda: len(served.engine.live) == 5)
    drained = threading.Thread(target=lambda: answers.append(_drain(served, 30)))
    drained.start()
    until(lambda: served.app.state.gate.draining)
    refused = served.complete(**GOOD)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert served.http.get("/health").status_code == 503
    for run in [*runs, drained]:
        run.join()
    assert answers.count(True) == 1
    assert [one.json()["choices"] for one in answers if one is not True] == [want] * 5


def test_a_drain_aborts_what_takes_too_long(start) -> None:
    served = start(pace=0.05)
    sock = opened(served, {**LONG, "stream": True})
    until(lambda: served.engine.steps > 3)
    assert _drain(served, 0.2) is False
    served.loop.call_soon_threadsafe(served.app.state.service.abort_all)
    data = b""
    while b"[DONE]" not in data:
        data += sock.recv(1 << 16)
    assert b'"code":"draining"' in data
    sock.close()
    until(lambda: not served.engine.live)


def _drain(served: Served, seconds: float) -> bool:
    import asyncio

    return asyncio.run_coroutine_threadsafe(served.app.state.gate.drained(seconds), served.loop).result()
