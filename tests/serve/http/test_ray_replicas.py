"""Two replicas of the native engine on a Ray cluster: tokens, cancelation, a killed replica, prefix hits (slow, on demand:
benchmarks/peers/make ray)."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_server import TEMPLATE, TEXT
from ray_server import BIN, DEFAULT_ROUTER, Replicas, replicas
from real_server import real_server, write_directory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (BIN.parent / "ready").exists(), reason="bash benchmarks/peers/make ray"),
]
PROMPTS = [TEXT[begin : begin + 20] for begin in range(0, 48, 4)]
GROUPS, PER_GROUP = 8, 6


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory) -> Path:
    return write_directory(*trained, tmp_path_factory.mktemp("model") / "tiny", TEMPLATE)


@pytest.fixture(scope="module")
def alone(directory) -> dict[str, Any]:
    """What one server answers."""
    chat = [{"role": "user", "content": "the cat"}]
    with real_server(directory) as real:
        answers = [real.complete(prompt=one, return_token_ids=True).json() for one in PROMPTS]
        said = real.chat(messages=chat).json()["choices"][0]["message"]["content"]
    return {"tokens": [one["choices"][0]["token_ids"] for one in answers], "chat": said, "messages": chat}


@pytest.fixture(scope="module")
def ray(directory, tmp_path_factory):
    with replicas(directory, tmp_path_factory.mktemp("ray") / "prefix") as served:
        yield served


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def hit_rate(ray: Replicas) -> float:
    """The part of prompt tokens that came from a prefix cache: groups of prompts that begin alike, one after another."""
    cached = total = 0
    for number in range(PER_GROUP):
        for group in range(GROUPS):
            usage = ray.complete(prompt=f"group {group}: {TEXT * 4} {number}", max_tokens=2)["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
    return cached / total


@pytest.fixture(scope="module")
def default_rate(directory, tmp_path_factory) -> float:
    """The hit rate by Ray's default router, on a cluster that ends before the other begins."""
    with replicas(directory, tmp_path_factory.mktemp("ray") / "default", DEFAULT_ROUTER) as served:
        return hit_rate(served)


def test_prompts_that_begin_alike_hit_one_replica(default_rate: float, ray: Replicas) -> None:
    aware = hit_rate(ray)
    print(f"prefix hit rate: {aware:.3f} prefix-aware, {default_rate:.3f} by Ray's default")
    assert aware > 0.95 * (PER_GROUP - 1) / PER_GROUP
    assert aware > default_rate + 0.05


def test_tokens_are_those_of_one_server(ray: Replicas, alone: dict[str, Any]) -> None:
    with ThreadPoolExecutor(6) as threads:
        whole = list(threads.map(lambda prompt: ray.complete(prompt=prompt), PROMPTS))
    assert [tokens(one) for one in whole] == alone["tokens"]
    assert all(count > 0 for count in ray.metric("generation_tokens_total").values()), "both replicas answered"
    for prompt, one in zip(PROMPTS, whole, strict=True):
        stream = ray.openai.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == one["choices"][0]["text"]
    chat: Any = {"model": "tiny", "messages": alone["messages"], "max_tokens": 12, "temperature": 0}
    said = ray.openai.chat.completions.create(**chat).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ray.openai.chat.completions.create(**chat, stream=True)]
    assert said == "".join(parts) == alone["chat"]


def test_the_guard_stands_before_the_replicas(ray: Replicas) -> None:
    body = {"prompt": "the", "max_tokens": 2}
    with httpx2.Client(base_url=ray.url, timeout=30) as anyone:
        assert anyone.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/no/such/route"):
            assert anyone.get(path).status_code == 401
        assert anyone.post("/v1/completions", json=body).status_code == 401
    assert ray.http.post("/v1/completions", json=body, headers={"Host": "evil.example"}).status_code == 403
    assert ray.http.post("/v1/completions", json=body, headers={"Origin": "http://evil.example"}).status_code == 403
    assert ray.http.post("/v1/completions", json={**body, "model": "another"}).status_code == 404
    for content, status in ((b"{", 400), (b"x" * (9 << 20), 413)):
        answer = ray.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status


def test_a_client_that_goes_away_ends_its_request(ray: Replicas) -> None:
    body = {"prompt": "the cat", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    with ray.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
        assert sum(ray.metric("num_requests_running").values()) == 1
    ray.wait(lambda: sum(ray.metric("num_requests_running").values()) == 0, 5)
    with pytest.raises(httpx2.ReadTimeout):
        ray.http.post("/v1/completions", json=body, timeout=1.0)
    ray.wait(lambda: sum(ray.metric("num_requests_running").values()) == 0, 5)
    before = sum(ray.metric("generation_tokens_total").values())
    time.sleep(1)
    assert sum(ray.metric("generation_tokens_total").values()) == before < 8000


def test_a_killed_replica_is_replaced_and_no_request_is_lost(ray: Replicas, alone: dict[str, Any]) -> None:
    """Run last: the prefix caches of the module's replicas are gone."""
    before = set(ray.metric("num_requests_running"))
    victims = ray.engine_workers()
    assert len(victims) == len(before) == 2
    long = {"max_tokens": 250, "ignore_eos": True}
    expected = [tokens(ray.complete(prompt=prompt, **long)) for prompt in PROMPTS[:8]]
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(ray.complete, prompt=prompt, **long) for prompt in PROMPTS[:8]]
        ray.wait(lambda: sum(ray.metric("num_requests_running").values()) >= 4, 20)
        os.kill(victims[0], signal.SIGKILL)
        during = [tokens(ray.complete(prompt=prompt)) for prompt in PROMPTS]
        assert [tokens(one.result()) for one in running] == expected
    assert during == alone["tokens"]
    ray.wait(lambda: len(ray.metric("num_requests_running")) == 2, 120)
    after = set(ray.metric("num_requests_running"))
    assert len(after & before) == 1
    (new,) = after - before
    for number in range(40):  # of other prefixes, so that the new replica gets some
        ray.complete(prompt=f"{number} {TEXT}", max_tokens=1)
    assert ray.metric("generation_tokens_total")[new] > 0
