"""Throughput and latency of servers under load: `dovetail serve` against static batching, transformers serve and vLLM.

A Llama of 55 M parameters (float32, two threads) is asked for completions of mixed lengths: prompts of 16 to 256 tokens and
answers of 8 to 96, all as long as asked for. Requests arrive as a Poisson process, faster than any side serves them, and at
most 16 are in flight. Of 1.1 B parameters the prompts and answers are half as long, 4 are in flight, and vLLM is the only other
side: more do not fit into memory. All sides get the same requests; servers run all the time and are asked in turns, so that a
ratio is of one round. Static batching is our own model in
batches in the order of arrival, as large: each waits for its longest prompt and answer. In greedy decoding the tokens of ours
are those of static batching. Each peer runs as its documentation recommends: vLLM with its compiler, transformers with
continuous batching; flags and environments are in the JSON (`peers`). Ours, at 55 M, and vLLM decode by compiled graphs, which
are made before the first round.

    python benchmarks/serve.py [--shapes 55m 1b] [--rounds 5] [--json]      peers: benchmarks/peers/make serving, … make vllm

Then, of the native engine alone, at 55 M: the share of the scheduler in a step; the waste of the paged KV cache, which is the
share of its entries in pages of running requests that hold no token, over all steps; the time to the first token behind a
prefix of 512 tokens that is cached ÷ that of the rest alone; and the time of requests that share nothing with the prefix cache
on ÷ off.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses as dc
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import real_servers
import torch
from bare import Shape
from measure import Goal, Row, arguments, middle, progress, report
from real_servers import SERVERS, Server, running

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.decoding.generation import Vocabulary
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request as EngineRequest
from dovetail.state.pool import Pool
from dovetail.text.tokenizer import Tokenizer

LONGEST = 1024
SECONDS = 900.0
GOALS = {"static batching": Goal(low=2.0), "transformers": Goal(low=3.0), "vllm": Goal(low=1.0)}
TINY = Shape(width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128)


@dc.dataclass(frozen=True)
class Load:
    """A model, and what is asked of it."""

    named: str  # the begin of the names of its rows
    shape: Shape
    rounds: int = 5
    requests: int = 48  # of a round
    in_flight: int = 16
    prompt: int = 256  # tokens, at most
    answer: int = 96
    compiled: bool = True  # ours decodes by a compiled graph, which takes twice the memory
    sides: tuple[str, ...] = ("transformers", "vllm", "static batching")  # that ours is compared with; all run at once


LARGE = Shape(width=2048, layers=16, heads=32, kv_heads=8, hidden=8192)
LOADS = {
    "55m": Load("", Shape()),
    # 4.4 GB of weights, and vLLM's compiler: more sides do not fit into 24 GB at once
    "1b": Load("1.1 B, ", LARGE, requests=16, in_flight=4, prompt=128, answer=48, compiled=False, sides=("vllm",)),
    "quick": Load("", TINY, rounds=1, requests=8),
}
OURS = ("--rows=16", "--queued=256", f"--longest={LONGEST}")


@dc.dataclass(frozen=True)
class Request:
    """When it arrives, its prompt, and how many tokens it wants."""

    arrival: float
    prompt: list[int]
    text: str
    new: int


@dc.dataclass(frozen=True)
class Served:
    """What a round gave: its seconds, and those of each request."""

    seconds: float
    latencies: list[float]
    tokens: int


def write_model(place: Path, shape: Shape) -> Tokenizer:
    """Write a Llama with random weights in Hugging Face layout, with a tokenizer of one token per character."""
    tokenizer = Tokenizer(real_servers.characters())
    model = dt.build(shape.spec(), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # far from ties, so that greedy tokens do not depend on the kernel
    model.vocabulary = Vocabulary(tokenizer=tokenizer)
    dt.save(model, place / "own")
    dt.export(place / "own", place / "model")
    return tokenizer


def requests(load: Load, count: int, tokenizer: Tokenizer, seed: int) -> list[Request]:
    """Requests of mixed lengths: 50 arrivals per second, which no side keeps up with."""
    draw, moment, found = random.Random(seed), 0.0, list[Request]()
    for _ in range(count):
        text = "".join(chr(draw.randrange(97, 123)) for _ in range(draw.randint(16, load.prompt)))
        found.append(Request(moment, tokenizer.encode(text).tolist(), text, draw.randint(8, load.answer)))
        moment += draw.expovariate(50.0)
    return found


async def asked(url: str, model: str, work: Sequence[Request], by_text: bool, at_once: int) -> tuple[Served, list[str]]:
    """Send all requests at their times, so many at once at most."""
    gate, begin = asyncio.Semaphore(at_once), time.perf_counter()
    limits = httpx2.Limits(max_connections=at_once)
    async with httpx2.AsyncClient(timeout=SECONDS, limits=limits) as client:

        async def one(request: Request) -> tuple[float, int, str]:
            await asyncio.sleep(max(0.0, request.arrival - (time.perf_counter() - begin)))
            fields: dict[str, Any] = {"model": model, "max_tokens": request.new, "temperature": 0}
            fields |= {"prompt": request.text} if by_text else {"prompt": request.prompt, "ignore_eos": True}
            async with gate:
                answer = await client.post(f"{url}/completions", json=fields)
            answer.raise_for_status()
            data = answer.json()
            return time.perf_counter() - begin - request.arrival, data["usage"]["completion_tokens"], data["choices"][0]["text"]

        found = await asyncio.gather(*(one(request) for request in work))
    seconds = time.perf_counter() - begin
    return Served(seconds, [one[0] for one in found], sum(one[1] for one in found)), [one[2] for one in found]


@torch.inference_mode()
def static(model: dt.Transformer, work: Sequence[Request], at_once: int) -> tuple[Served, list[list[int]]]:
    """Batches in the order of arrival, each until its longest answer."""
    begin, tokens, latencies = time.perf_counter(), list[list[int]](), list[float]()
    for first in range(0, len(work), at_once):
        some = work[first : first + at_once]
        time.sleep(max(0.0, some[-1].arrival - (time.perf_counter() - begin)))
        pool = Pool(model.spec, len(some), LONGEST)
        rows = list(range(len(some)))
        longest = max(len(one.prompt) for one in some)
        ids = torch.zeros(len(some), longest, dtype=torch.long)
        for row, one in enumerate(some):
            ids[row, : len(one.prompt)] = torch.tensor(one.prompt)
        step = pool.step(rows, [len(one.prompt) for one in some])
        x, ctx = model.hidden(ids, dt.Ctx(layout=step.layout, views=step.views))
        last = torch.tensor([len(one.prompt) - 1 for one in some])  # rows are padded on the right
        made = [model.head(x[torch.arange(len(some)), last][:, None], ctx)[:, -1].argmax(-1)]
        for _ in range(max(one.new for one in some) - 1):
            step = pool.step(rows, [1] * len(rows))
            logits = model.next_logits(made[-1][:, None], dt.Ctx(layout=step.layout, views=step.views))[:, -1]
            made.append(logits.argmax(-1))
        answers = torch.stack(made, 1).tolist()
        now = time.perf_counter() - begin
        latencies += [now - one.arrival for one in some]
        tokens += [answer[: one.new] for answer, one in zip(answers, some, strict=True)]
    return Served(time.perf_counter() - begin, latencies, sum(map(len, tokens))), tokens


@contextlib.contextmanager
def started(names: Sequence[str], place: Path, load: Load) -> Iterator[dict[str, tuple[Server, str, str]]]:
    """The servers that can be started: name -> (server, URL, the model's name there)."""
    with contextlib.ExitStack() as stack:
        found: dict[str, tuple[Server, str, str]] = {}
        for name in names:
            server, log = SERVERS[name], place / f"{name}.log"
            if name == "dovetail" and load.compiled:
                server = dc.replace(server, loaded=(*server.loaded, "--compiled"))
            how = {"rows": load.in_flight, "longest": LONGEST, "threads": torch.get_num_threads()}
            try:
                url = stack.enter_context(running(server, place / "model", "float32", log, **how))
            except (FileError, OSError) as error:
                print(f"{name} is left out: {str(error)[-600:]}", file=sys.stderr)
                continue
            known = httpx2.get(f"{url}/models", timeout=60).json()["data"]
            found[name] = (server, url, str(place / "model") if server.by_path else known[0]["id"])
        yield found


def compared(load: Load, place: Path, tokenizer: Tokenizer, peers: dict[str, Any]) -> list[Row]:
    """Requests per second of ours ÷ each other side's, round by round; `peers` gets how each side was run."""
    batched, rows = "static batching" in load.sides, list[Row]()
    model = dt.load(place / "own") if batched else None
    times: dict[str, list[Served]] = {}
    named, count = load.named, load.requests
    names = ["dovetail", *(name for name in load.sides if name in SERVERS)]
    with started(names, place, load) as servers, progress("rounds", load.rounds + 1) as tick:
        how = {"rows": load.in_flight, "longest": LONGEST, "threads": torch.get_num_threads()}
        peers |= {f"{named}{name}": server.described("float32", **how) for name, (server, _, _) in servers.items()}
        for turn in range(load.rounds + 1):  # the first warms up
            work = requests(load, count if turn else 4, tokenizer, seed=turn)
            sides = [*servers, *(["static batching"] if batched else [])]
            for name in sides if turn % 2 else reversed(sides):
                if model is not None and name == "static batching":
                    served, tokens = static(model, work, load.in_flight)
                    if turn == 0:
                        _same(model, work, tokens, servers)
                else:
                    server, url, known = servers[name]
                    served, _ = asyncio.run(asked(url, known, work, server.text, load.in_flight))
                if turn:
                    times.setdefault(name, []).append(served)
                    print(f"{name}: {count / served.seconds:.2f} requests/s, {served.tokens} tokens", file=sys.stderr)
            tick()
    for name, found in times.items():
        speed, spread = middle([count / one.seconds for one in found])
        latencies = sorted(latency for one in found for latency in one.latencies)
        rows.append(Row(f"{named}{name}: requests/s", speed, None, spread))
        rows.append(Row(f"{named}{name}: latency, p50, s", statistics.median(latencies)))
        rows.append(Row(f"{named}{name}: latency, p99, s", latencies[int(0.99 * (len(latencies) - 1))]))
        if name != "dovetail" and "dovetail" in times:
            pairs = zip(found, times["dovetail"], strict=True)
            ratio, apart = middle([theirs.seconds / ours.seconds for theirs, ours in pairs])
            rows.append(Row(f"{named}requests/s: dovetail ÷ {name}", ratio, GOALS.get(name), apart))
    return rows


def _same(model: dt.Transformer, work: Sequence[Request], tokens: list[list[int]], servers: dict[str, Any]) -> None:
    """Stop unless our server's greedy tokens are those of static batching."""
    if "dovetail" not in servers:
        return
    _, url, known = servers["dovetail"]
    for request, want in zip(work, tokens, strict=True):
        fields = {"model": known, "prompt": request.prompt, "max_tokens": request.new, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{url}/completions", json={**fields, "return_token_ids": True}, timeout=SECONDS).json()
        if answer["choices"][0]["token_ids"] != want:
            raise SystemExit("the server decodes other tokens than static batching; nothing was timed")


def waste(tokenizer: Tokenizer, load: Load) -> float:
    """The share of entries without a token in the pages of running requests, over all steps. A tiny model is enough: which
    requests run together depends on their lengths alone."""
    engine = Engine(dt.build(TINY.spec(), seed=0).eval(), rows=load.in_flight, longest=LONGEST, share=False)
    slots, held, entries = engine.runner.slots, 0, 0
    assert slots is not None
    waiting = [EngineRequest(id=str(i), prompt=tuple(one.prompt), max_tokens=one.new) for i, one in
               enumerate(requests(load, load.requests, tokenizer, seed=1))]  # fmt: skip
    while waiting or engine.busy:
        while waiting and len(engine.requests) < load.in_flight:
            engine.add(waiting.pop(0))
        engine.step()
        held += sum(one.computed for one in engine.schedule.running)
        entries += sum(map(len, slots.owned)) * slots.page
    return 1 - held / entries


def own(place: Path, tokenizer: Tokenizer, rounds: int, quick: bool) -> list[Row]:
    """What the native engine spends beside the model."""
    from served import served

    draw, rows = random.Random(7), list[Row]()

    def drawn(n: int) -> list[int]:
        return tokenizer.encode("".join(chr(draw.randrange(97, 123)) for _ in range(n))).tolist()

    def first_token(url: str, prompt: list[int]) -> float:
        begin = time.perf_counter()
        fields = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        httpx2.post(f"{url}/v1/completions", json=fields, timeout=SECONDS).raise_for_status()
        return time.perf_counter() - begin

    held = 64 if quick else 512
    with served(place / "own", *OURS) as shares, served(place / "own", *OURS, "--no-share") as plain:
        work = [Request(0.0, drawn(draw.randint(16, 256)), "", draw.randint(8, 64)) for _ in range(8 if quick else 32)]
        name = httpx2.get(f"{shares.url}/v1/models", timeout=60).json()["data"][0]["id"]
        asyncio.run(asked(f"{shares.url}/v1", name, work, by_text=False, at_once=16))
        found = shares.metrics()
        share = found["schedule_seconds_total"] / found["step_seconds_total"]
        rows.append(Row("share of the scheduler in a step", share, Goal(high=0.02)))
        rows.append(Row("waste of the paged KV cache", waste(tokenizer, LOADS["55m"]), Goal(high=0.04)))
        warm, cold = list[float](), list[float]()
        for _ in range(3 * rounds):
            prefix = drawn(held)
            first_token(shares.url, [*prefix, *drawn(32)])  # stores it
            ideal = first_token(shares.url, drawn(32))
            warm.append(first_token(shares.url, [*prefix, *drawn(32)]) / ideal)
            apart = drawn(held)
            cold.append(first_token(shares.url, apart) / first_token(plain.url, apart))
        for shown, values, goal in (
            (f"time to the first token: {held} cached tokens and 32 more ÷ 32", warm, Goal(high=1.15)),
            ("the same without a hit: prefix cache on ÷ off", cold, Goal(high=1.01)),
        ):
            value, spread = middle(values)
            rows.append(Row(shown, value, goal, spread))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="times that every side serves all requests (default: 5)")
    parser.add_argument("--shapes", nargs="*", choices=["55m", "1b"], default=["55m", "1b"], help="sizes of the model")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended too
    rows, peers = list[Row](), dict[str, Any]()
    for name in ["quick"] if flags.quick else flags.shapes:
        load = LOADS[name] if flags.rounds is None else dc.replace(LOADS[name], rounds=flags.rounds)
        with tempfile.TemporaryDirectory() as place:
            tokenizer = write_model(Path(place), load.shape)
            rows += compared(load, Path(place), tokenizer, peers)
            if name != "1b":
                rows += own(Path(place), tokenizer, load.rounds, flags.quick)
    report(rows, flags.json, peers=peers)


if __name__ == "__main__":
    main()
