"""Faults of a server by its clients (S1, S2, S6 to S10): they vanish, flood, send nonsense, read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
from measure import Goal, Row
from served import SECONDS, Server, body, message, served, write_model

from dovetail.base.limits import REQUEST_ITEMS

NONE, ALL = Goal(high=0), Goal(low=1)
RATE = 200  # requests per second of the flood: of a thousand at once, the last waits for the work on all others
PROMPTS = ("It was", "the best of times 🙂", "über allen", "日本語", "👩‍👩‍👧 it was the age")


def s1(place: Path, each: int = 50, bystanders: int = 10) -> list[Row]:
    """Streaming and plain clients close their connections in mid-decode, beside others that wait for their answers."""
    long = 1500
    with served(write_model(place / "model"), "--rows=16", "--queued=256", "--no-share", "--longest=2048") as server:
        prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(bystanders)]
        alone = [server.text(prompt, max_tokens=64) for prompt in prompts]
        clients = [server.raw(body(f"it was {i}", max_tokens=long, stream=i < each)) for i in range(2 * each)]
        for one in clients[:8]:
            one.recv(64)  # decoding has begun
        answers: list[str] = []
        run = threading.Thread(target=lambda: answers.extend(asyncio.run(texts_of(server, prompts, max_tokens=64))))
        run.start()
        time.sleep(0.5)
        for one in clients:
            one.close()
        free = server.wait(lambda now: now["num_requests_running"] + now["num_requests_waiting"] <= bystanders)
        run.join()
        server.wait(lambda now: now["num_requests_running"] == 0)
        used = server.metrics()["kv_cache_usage_perc"]
    return [
        Row(f"S1 {2 * each} clients gone in mid-decode: seconds until none of their requests is left", free, Goal(high=1)),
        Row("S1 share of the cache in use at the end", used, NONE),
        Row(
            f"S1 of {bystanders} bystanders, texts that differ", sum(a != b for a, b in zip(answers, alone, strict=True)), NONE
        ),
    ]


def s2(place: Path, count: int = 1000, queued: int = 64) -> list[Row]:
    """Many more requests than run and wait."""
    with served(write_model(place / "model"), "--rows=8", f"--queued={queued}") as server:
        server.text("It was")
        before = server.memory()
        with server.health(every=0.05) as health:
            found = asyncio.run(_flood(server, count))
        after = server.memory()
    refused = [(seconds, answer) for seconds, answer in found if status(answer) == 429]
    accepted = [answer for _, answer in found if status(answer) == 200]
    late = sorted(seconds for seconds, _ in refused)
    return [
        Row(
            f"S2 {count} requests, room for {8 + queued}: answered by 200 or 429", len(refused) + len(accepted), Goal(low=count)
        ),
        Row("S2 finished", len(accepted), Goal(low=8 + queued)),
        Row("S2 429 without Retry-After", sum(b"\r\nretry-after: " not in answer for _, answer in refused), NONE),
        Row("S2 p99 of the time until a 429, seconds", late[int(len(late) * 0.99) - 1] if late else 0.0, Goal(high=0.25)),
        Row("S2 slowest /health, seconds", max(health), Goal(high=0.2)),
        Row("S2 memory, MB more", after - before, Goal(high=100)),
    ]


async def _flood(server: Server, count: int) -> list[tuple[float, bytes]]:
    """The seconds and the bytes of each answer. Plain sockets: an HTTP client would take more time than the server."""

    async def one(i: int) -> tuple[float, bytes]:
        await asyncio.sleep(i / RATE)
        begin = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(message(json.dumps(body(f"it was {i}", max_tokens=400)).encode()))
        answer = await reader.read()
        writer.close()
        return time.monotonic() - begin, answer

    return await asyncio.gather(*(one(i) for i in range(count)))


def status(answer: bytes) -> int:
    """The code of an answer; 0 where there is none."""
    return int(answer[9:12] or 0)


async def texts_of(server: Server, prompts: list[str], **more: Any) -> list[str]:
    """The texts of greedy completions that are asked at once."""
    async with server.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(one, **more)) for one in prompts))
    return [answer.json()["choices"][0]["text"] for answer in answers]


def malformed(rng: random.Random) -> bytes:
    """The bytes of a body that no route accepts."""
    good = body("it was")
    return rng.choice(
        [
            lambda: b"",
            lambda: b"{",
            lambda: rng.randbytes(rng.randrange(1, 200)),
            lambda: json.dumps([good]).encode(),
            lambda: json.dumps({**good, "prompt": None}).encode(),
            lambda: json.dumps({**good, "prompt": [1, "a"]}).encode(),
            lambda: json.dumps({**good, "prompt": [10**9]}).encode(),
            lambda: json.dumps({**good, "max_tokens": rng.choice([-1, "5", 2**63, 1.5, [], True])}).encode(),
            lambda: json.dumps({**good, "temperature": rng.choice([-1, "hot", 1e9, {}])}).encode(),
            lambda: json.dumps({**good, "model": "nobody"}).encode(),
            lambda: json.dumps({**good, "stop": [""] * rng.randrange(1, 40)}).encode(),
            lambda: json.dumps({**good, "logit_bias": {"x": 1}}).encode(),
            lambda: json.dumps({**good, "n": rng.choice([0, 10**9, "two"])}).encode(),
            lambda: b"[" * 5000,
            lambda: json.dumps(good).encode()[: rng.randrange(1, 40)],
        ]
    )()


def s6(place: Path, bad: int = 500, good: int = 100) -> list[Row]:
    """Malformed requests among good ones."""
    rng = random.Random(6)
    with served(write_model(place / "model"), "--rows=8", f"--queued={good}") as server:
        prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(good)]
        alone = [server.text(prompt, max_tokens=8) for prompt in prompts]

        async def run() -> tuple[list[int], list[str]]:
            async with server.client(40) as client:
                headers = {"Content-Type": "application/json"}
                sent = [client.post("/v1/completions", content=malformed(rng), headers=headers) for _ in range(bad)]
                asked = texts_of(server, prompts, max_tokens=8)
                *refused, texts = await asyncio.gather(*sent, asked)
                return [answer.status_code for answer in refused], texts

        codes, texts = asyncio.run(run())
        same = server.process.poll() is None and Path(f"/proc/{server.engine}").exists()
    return [
        Row(f"S6 {bad} malformed requests: answered by 4xx", sum(400 <= code < 500 for code in codes), Goal(low=bad)),
        Row(f"S6 of {good} good ones, texts that differ", sum(a != b for a, b in zip(texts, alone, strict=True)), NONE),
        Row("S6 both processes live", float(same), ALL),
    ]


def s7(place: Path, slow: int = 100, asked: int = 40) -> list[Row]:
    """Clients that read a byte per second, beside others: the time until the first token of these."""
    with served(write_model(place / "model"), "--rows=8", f"--queued={slow}") as server:
        before = [_first_token(server, i) for i in range(asked)]
        clients = [server.raw(body(f"slow {i}", max_tokens=200, stream=True)) for i in range(slow)]
        server.wait(lambda now: now["num_requests_running"] + now["num_requests_waiting"] == 0, 300)
        done = threading.Event()

        def read() -> None:
            while not done.wait(1):
                for one in clients:
                    one.recv(1)

        reading = threading.Thread(target=read)
        reading.start()
        beside = [_first_token(server, asked + i) for i in range(asked)]
        done.set()
        reading.join()
        for one in clients:
            one.close()
    p95 = [statistics.quantiles(times, n=20)[-1] for times in (beside, before)]
    return [
        Row(f"S7 {slow} readers of a byte per second: p95 of the first token ÷ without them", p95[0] / p95[1], Goal(high=1.5))
    ]


def _first_token(server: Server, i: int) -> float:
    begin = time.monotonic()
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body(f"quick {i}", stream=True), timeout=SECONDS) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - begin
    raise SystemExit("a stream had no token")


def s8(place: Path, prompts: int = 200) -> list[Row]:
    """OpenAI's client, on prompts with emoji."""
    differ = counted = 0
    with served(write_model(place / "model")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for i in range(prompts):
            asked: dict[str, Any] = {"prompt": f"{PROMPTS[i % len(PROMPTS)]} {i % 37}", "max_tokens": 5 + i % 20, "seed": i}
            whole = client.completions.create(model="model", **asked, temperature=0.8)
            text, usage = "", None
            stream = client.completions.create(
                model="model", **asked, temperature=0.8, stream=True, stream_options={"include_usage": True}
            )
            for piece in stream:
                text += piece.choices[0].text if piece.choices else ""
                usage = piece.usage or usage
            differ += text != whole.choices[0].text
            counted += _counts(usage) == _counts(whole.usage) and 0 < _counts(usage)[1] <= asked["max_tokens"]
    return [
        Row(f"S8 {prompts} prompts, streamed texts that differ from whole ones", differ, NONE),
        Row("S8 usage is equal and in range", counted, Goal(low=prompts)),
    ]


def _counts(usage: Any) -> tuple[int, int, int]:
    """Tokens of the prompt, of the text, of both; the second request finds some of them cached, which is counted apart."""
    return (0, 0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def s9(place: Path, rounds: int = 5) -> list[Row]:
    """Fields that are far too large; the event loop must not wait for them."""
    good = body("it was")
    hostile: list[bytes] = [
        json.dumps({**good, **field}).encode()
        for field in (
            {"n": 10**9},
            {"max_tokens": 2**63},
            {"logprobs": 10**6},
            {"stop": ["x"] * 100_000},
            {"prompt": "a " * 3_000_000},
            {"prompt": [1 + i % 999 for i in range(REQUEST_ITEMS - 10)]},
            {"logit_bias": {str(i): 1 for i in range(100_000)}},
        )
    ]
    hostile += [b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "' + b"a" * (64 << 20) + b'"}']
    with served(write_model(place / "model")) as server:
        server.text("it was")
        for data in hostile:  # once before: buffers of this size are taken once
            _lag(server, data)
        before = server.memory()
        found = [_lag(server, data) for _ in range(rounds) for data in hostile]
        after = server.memory()
    return [
        Row(
            f"S9 {len(found)} hostile bodies: answered by 4xx",
            sum(400 <= code < 500 for code, _ in found),
            Goal(low=len(found)),
        ),
        Row("S9 slowest /health beside them, seconds", max(lag for _, lag in found), Goal(high=0.1)),
        Row("S9 memory, MB more", after - before, Goal(high=20)),
    ]


def _lag(server: Server, data: bytes) -> tuple[int, float]:
    """The status of a body, and the slowest answer of /health while it is read."""
    with server.health(every=0.005) as health, socket.create_connection(("127.0.0.1", server.port), SECONDS) as sock:
        time.sleep(0.05)
        with contextlib.suppress(BrokenPipeError):  # an answer may come before all is sent
            sock.sendall(message(data))
        code = status(sock.recv(64))
    return code, max(health)


def s10(place: Path, minutes: float = 10.0) -> list[Row]:
    """A soak: requests of which a tenth is aborted and a twentieth is malformed; what is held after a third, and at the end."""
    rng, marks = random.Random(10), list[tuple[float, int]]()
    with served(write_model(place / "model"), "--rows=8", "--queued=64") as server:
        end = time.monotonic() + 60 * minutes
        third, count = end - 40 * minutes, 0
        while time.monotonic() < end:
            asyncio.run(_mixture(server, rng, count))
            count += 1
            if not marks and time.monotonic() > third:
                marks.append((server.memory(), _descriptors(server)))
        server.wait(lambda now: now["num_requests_running"] == 0)
        marks.append((server.memory(), _descriptors(server)))
        now = server.metrics()
    (before, files), (after, files_after) = marks[0], marks[-1]
    return [
        Row(
            f"S10 {minutes:g} minutes, {count} rounds of 20 requests: MB more than after a third of it",
            after - before,
            Goal(high=20),
        ),
        Row("S10 open files more", files_after - files, Goal(high=2)),
        Row("S10 requests that are left", now["num_requests_running"] + now["num_requests_waiting"], NONE),
    ]


async def _mixture(server: Server, rng: random.Random, round: int) -> None:
    async with server.client(20) as client:

        async def one(i: int) -> None:
            kind = rng.random()
            if kind < 0.05:
                await client.post("/v1/completions", content=malformed(rng), headers={"Content-Type": "application/json"})
            elif kind < 0.15:
                with contextlib.suppress(httpx2.HTTPError):
                    fields = body(f"{round} {i}", max_tokens=400)
                    await client.post("/v1/completions", json=fields, timeout=rng.uniform(0.02, 0.3))
            else:
                await client.post("/v1/completions", json=body(f"{round % 50} {i}", max_tokens=rng.randrange(1, 40)))

        await asyncio.gather(*(one(i) for i in range(20)))


def _descriptors(server: Server) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (server.process.pid, server.engine))
