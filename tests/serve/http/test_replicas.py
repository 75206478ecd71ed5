"""The app before several replicas, without Ray: where prompts go, what a lost replica costs, whom it lets in, and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import httpx2
import pytest
import uvicorn
from http_server import KEY, TEXT, Served
from prometheus_client.parser import text_string_to_metric_families
from small_engine import SmallEngine
from starlette.types import Message

from dovetail.serving.client import Busy
from dovetail.serving.http.app import make_app
from dovetail.serving.http.guard import Gate, Guard
from dovetail.serving.http.options import Options
from dovetail.serving.http.server import Server, bound_socket
from dovetail.serving.replicas.relay import BLOCK, Placement, Relay, ReplicaCall, ReplicaLost, answer, merge, prefix_keys


def keys(prompt, tenant: str = "", **fields) -> tuple[bytes, ...]:
    return prefix_keys(tenant, json.dumps({"model": "tiny", "prompt": prompt, **fields}).encode())


def shared(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=False))


def test_prompts_share_the_keys_of_their_common_prefix() -> None:
    prefix = "a system prompt " * 20
    assert len(keys(prefix)) == len(prefix) // BLOCK == 5
    assert shared(keys(prefix + "x" * 100), keys(prefix + "y" * 100)) == 5
    assert shared(keys(prefix + "x" * 100), keys("!" + prefix)) == 0
    ids = list(range(200))
    assert shared(keys([*ids, 7, 8]), keys([*ids, 9])) == len(json.dumps(ids)[:-1]) // BLOCK
    turn = [{"role": "user", "content": prefix}]
    longer = [*turn, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    first, second = (prefix_keys("", json.dumps({"messages": messages}).encode()) for messages in (turn, longer))
    assert shared(first, second) == len(first) > 4


def test_prefixes_of_two_tenants_models_or_salts_are_not_shared() -> None:
    prefix = "a system prompt " * 20
    others = [keys(prefix, "tenant"), keys(prefix, model="adapter"), keys(prefix, cache_salt="s")]
    assert not any(shared(keys(prefix), other) for other in others)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"7", b'{"prompt": null}', b"[" * 100_000, b"," * 600_000, b"\xff", b"{}"])
def test_bodies_without_a_prompt_have_no_keys(body: bytes) -> None:
    assert prefix_keys("", body) == ()


def test_a_prompt_goes_where_its_longest_prefix_went() -> None:
    placement, loads = Placement(), {"a": 0, "b": 0, "c": 0}
    first, second = keys("one " * 64), keys("two " * 64)
    assert sorted(placement.ranks(first, loads)[0]) == ["a", "b", "c"]
    placement.record(first, "b")
    placement.record(second, "c")
    assert placement.ranks(first, loads)[0] == ["b"]
    assert placement.ranks(keys("one " * 64 + "more " * 50), loads)[0] == ["b"]
    assert placement.ranks(keys("one " * 32 + "else " * 50), loads)[0] == ["b"]
    assert placement.ranks(second, loads)[0] == ["c"]
    assert sorted(placement.ranks(first, loads)[1]) == ["a", "c"], "the others are next, where it is full"
    assert sorted(placement.ranks(first, {"a": 0, "c": 0})[0]) == ["a", "c"], "it is gone"


def test_new_prompts_are_spread() -> None:
    first = Counter(Placement().ranks(keys("new " * 64), {"a": 0, "b": 0})[0][0] for _ in range(200))
    assert min(first["a"], first["b"]) > 50


def test_a_busy_replica_gets_no_more_of_its_prefix() -> None:
    placement, prompt = Placement(slack=4), keys("one " * 64)
    placement.record(prompt, "a")
    assert placement.ranks(prompt, {"a": 4, "b": 0})[0] == ["a"]
    assert placement.ranks(prompt, {"a": 5, "b": 0}) == [["b"], ["a"]]


def test_a_router_forgets_what_was_used_longest_ago_and_ends_of_prompts_first() -> None:
    placement = Placement(limit=12)
    old, new = keys("old " * 16 * 8), keys("new " * 16 * 8)
    placement.record(old, "a")
    placement.record(new, "b")
    assert len(placement.places) == 12
    assert placement.find(new, ["a", "b"]) == "b"
    assert [key in placement.places for key in old] == [True] * 4 + [False] * 4
    assert placement.find(old, ["a", "b"]) == "a", "by its first blocks"


class Fronted:
    """The app before two replicas of this process, under uvicorn. A replica in `lost` ends after so many parts of an answer."""

    def __init__(self, trained, pace: float) -> None:
        model, vocabulary = trained
        self.options = Options(models={"tiny": None}, keys=(KEY,), version="test")
        self.engines = {name: SmallEngine(model, pace=pace) for name in "ab"}
        self.apps = {name: make_app(engine, vocabulary, self.options) for name, engine in self.engines.items()}
        self.placement, self.asked, self.lost, self.full = Placement(), list[str](), dict[str, int](), False
        app = Guard(Relay(self.ask, self.metrics), self.options, Gate())
        self.server = Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        sock = bound_socket("127.0.0.1", 0)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([sock])), daemon=True)
        self.thread.start()
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", headers=headers, timeout=60)

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        if self.full:
            raise Busy(3.0)
        if not self.apps:
            raise ReplicaLost
        name = self.placement.ranks(call.keys, dict.fromkeys(self.apps, 0))[0][0]
        self.asked.append(name)
        self.placement.record(call.keys, name)
        async with aclosing(answer(self.apps[name], call)) as parts:
            number = 0
            async for part in parts:
                if number == self.lost.get(name, -1):
                    del self.apps[name]
                    raise ReplicaLost
                number += 1
                yield part

    async def metrics(self) -> bytes:
        return merge({name: app.state.service.metrics.text().decode() for name, app in self.apps.items()})

    def complete(self, prompt: str, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields})

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(10)
        for engine in self.engines.values():
            engine.threads.shutdown()


@pytest.fixture
def front(trained) -> Iterator[Fronted]:
    fronted = Fronted(trained, pace=0.01)
    yield fronted
    fronted.close()


def test_answers_are_those_of_one_server(front: Fronted, served: Served) -> None:
    for prompt in (TEXT[:20], TEXT[8:30], TEXT * 3):
        alone = served.complete(prompt=prompt, max_tokens=8).json()
        assert front.complete(prompt).json()["choices"] == alone["choices"]
        stream = [json.loads(line[6:]) for line in front.complete(prompt, stream=True).text.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in stream) == alone["choices"][0]["text"]


def test_prompts_that_begin_alike_go_to_one_replica(front: Fronted) -> None:
    for number in range(6):
        assert front.complete(f"{TEXT * 3} {number}").status_code == 200
    assert len(set(front.asked)) == 1
    for number in range(20):
        front.complete(f"{number} {TEXT}", max_tokens=1)
    assert set(front.asked) == {"a", "b"}


def test_every_route_but_health_needs_a_key(front: Fronted) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            with httpx2.Client(base_url=front.http.base_url) as anyone:
                assert anyone.get(path, headers=headers).status_code == 401
                assert anyone.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
    assert not front.asked, "no replica was asked"
    assert front.http.get("/health").json() == {"status": "ok"}


def test_a_lost_replica_is_replaced_before_the_answer_begins(front: Fronted, served: Served) -> None:
    expected = served.complete(prompt=TEXT, max_tokens=8).json()["choices"]
    front.lost = {"a": 0}
    for _ in range(12):
        assert front.complete(TEXT).json()["choices"] == expected
    assert set(front.asked) == {"a", "b"} or front.asked == ["b"] * 12


def test_a_replica_lost_in_mid_stream_is_an_error_event(front: Fronted) -> None:
    front.lost = {"a": 3, "b": 3}
    events = front.complete(TEXT, stream=True, max_tokens=40).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["code"] == "replica_lost"
    assert events[-2:] == ["data: [DONE]", ""]


def test_without_a_replica_there_is_an_error_with_a_time_to_wait(front: Fronted) -> None:
    front.lost = {"a": 0, "b": 0}
    for _ in range(2):
        answer = front.complete(TEXT)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert answer.json()["error"]["code"] == "no_replica"
    assert front.http.get("/health").status_code == 503
    front.full = True
    answer = front.complete(TEXT)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_in_the_engine(front: Fronted, stream: bool) -> None:
    body = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    if stream:
        with front.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx2.ReadTimeout):
            front.http.post("/v1/completions", json=body, timeout=0.5)
    end = time.monotonic() + 5
    while any(engine.live for engine in front.engines.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sum(engine.steps for engine in front.engines.values()) < 400


def test_bodies_are_bounded_before_a_replica_is_asked(front: Fronted) -> None:
    headers = {"Content-Type": "application/json"}
    assert front.http.post("/v1/completions", content=b"x" * (9 << 20), headers=headers).status_code == 413
    assert front.http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert not front.asked
    assert front.http.post("/v1/completions", content=b"{", headers=headers).status_code == 400


def test_metrics_of_all_replicas_are_on_one_page(front: Fronted) -> None:
    for number in range(20):
        front.complete(f"{number} {TEXT}", max_tokens=2)
    page = front.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    assert page.text.count("# TYPE dovetail:num_requests_running ") == 1
    running = families["dovetail:num_requests_running"].samples
    assert {one.labels["replica"] for one in running} == {"a", "b"}
    ended = [one for one in families["dovetail:request_success"].samples if one.name.endswith("_total")]
    assert sum(one.value for one in ended) == 20
    first = [one for one in families["dovetail:time_to_first_token_seconds"].samples if one.name.endswith("_count")]
    assert Counter(front.asked) == {one.labels["replica"]: one.value for one in first}
