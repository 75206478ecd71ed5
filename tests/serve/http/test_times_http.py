"""Times that `dovetail serve`, a real process, measures of its requests."""

from __future__ import annotations

import http.client
import re
import statistics
import threading
import time

import pytest
from http_server import TEMPLATE
from real_server import Real, real_server, write_directory

NAMES = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
)


def times(real: Real) -> dict[str, tuple[float, float]]:
    """(requests, seconds) by name."""
    text = real.http.get("/metrics").text

    def value(name: str) -> float:
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    return {name: (value(f"{name}_count"), value(f"{name}_sum")) for name in NAMES}


@pytest.mark.slow
def test_an_answer_is_not_held_back_by_the_socket(trained, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Head and body are two writes: without TCP_NODELAY the second waits for the client's delayed ACK, 40 ms on Linux."""
    place = write_directory(*trained, tmp_path_factory.mktemp("prompt") / "small", TEMPLATE)
    with real_server(place) as real:
        connection = http.client.HTTPConnection(real.url.removeprefix("http://"), timeout=60)
        seconds = list[float]()
        for _ in range(30):
            begin = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            seconds.append(time.monotonic() - begin)
    assert statistics.median(seconds) < 0.03


@pytest.mark.slow
def test_queue_and_prefill_are_parts_of_the_time_to_the_first_token(trained, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = write_directory(*trained, tmp_path_factory.mktemp("timed") / "small", TEMPLATE)
    with real_server(place, "--rows=1", "--metrics-prefix=vllm") as real:
        real.complete(prompt="the cat", n=1)
        _, alone = times(real)["request_queue_time_seconds"]
        asking = [
            threading.Thread(target=real.complete, kwargs={"prompt": f"{i}", "max_tokens": 60, "ignore_eos": True})
            for i in range(4)
        ]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        found = times(real)
    assert {name: count for name, (count, _) in found.items()} == dict.fromkeys(NAMES, 5)
    queue, prefill, first, _ = (found[name][1] for name in NAMES)
    assert prefill > 0
    assert queue + prefill <= first
    assert queue > 2 * alone  # three of four waited for the one row
