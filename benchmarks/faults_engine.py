"""Faults of a server's engine (S3 to S5, S11, S12), inputs that cost too much (P5 to P7), and equal answers (N3, N7)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from faults_clients import ALL, NONE, PROMPTS, texts_of
from measure import Goal, Row
from served import SECONDS, WINDOWS, Server, body, served, write_model

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.base.limits import TEMPLATE_SECONDS
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.text.chat import ChatTemplate
from dovetail.weights.adapters.storage import adapter_tensors

KEY = {"Authorization": "Bearer admin"}


def s3(place: Path, count: int = 160, least: int = 100) -> list[Row]:
    """A KV cache with room for a quarter of what the running requests would hold."""
    model = write_model(place / "model")
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(count)]
    with served(model, "--rows=8", f"--queued={count}", "--longest=512") as server:
        want = asyncio.run(texts_of(server, prompts, max_tokens=120))
    pages = 8 * (128 // 8) // 4 + 2
    with served(model, "--rows=8", f"--queued={count}", "--longest=144", f"--pages={pages}") as server:
        got = asyncio.run(texts_of(server, prompts, max_tokens=120))
        preemptions = server.metrics()["num_preemptions_total"]
    return [
        Row(f"S3 a cache of {pages} pages for 8 rows: preemptions", preemptions, Goal(low=least)),
        Row(
            f"S3 of {count} texts, those that differ from a run without",
            sum(a != b for a, b in zip(got, want, strict=True)),
            NONE,
        ),
    ]


def s4(place: Path, flights: int = 10) -> list[Row]:
    """SIGTERM with requests in flight."""
    rows: list[Row] = []
    model = write_model(place / "model")
    for seconds, goal in ((120, Goal(low=flights)), (0, Goal(high=flights))):
        with served(model, f"--rows={flights}", f"--drain-seconds={seconds}", "--longest=2048") as server:
            answers: list[httpx2.Response | Exception] = []

            def ask(i: int, url: str = server.url, answers: list[Any] = answers) -> None:
                try:
                    answers.append(httpx2.post(f"{url}/v1/completions", json=body(f"it {i}", max_tokens=300), timeout=SECONDS))
                except httpx2.HTTPError as error:
                    answers.append(error)

            runs = [threading.Thread(target=ask, args=(i,)) for i in range(flights)]
            for run in runs:
                run.start()
            server.wait(lambda now: now["num_requests_running"] == flights)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(SECONDS)
            took = time.monotonic() - begin
            for run in runs:
                run.join()
        finished = sum(isinstance(one, httpx2.Response) and one.status_code == 200 for one in answers)
        how = f"S4 SIGTERM with {flights} in flight, --drain-seconds {seconds}"
        rows += [Row(f"{how}: finished", finished, goal), Row(f"{how}: exit code", code, NONE)]
        if not seconds:
            rows.append(Row(f"{how}: seconds until the end", took, Goal(high=3)))
    return rows


def s5(place: Path, clients: int = 8) -> list[Row]:
    """The engine's process is killed: the server ends with an error, or starts it again."""
    model = write_model(place / "model")
    rows = list[Row]()
    for restarts in (0, 1):
        log = place / f"log{restarts}"
        with served(model, "--longest=4096", f"--restart={restarts}", log=log) as server:
            want = server.text("it was")
            ends: list[float] = []

            def ask(i: int, url: str = server.url, ends: list[float] = ends) -> None:
                try:
                    fields = body(f"it {i}", max_tokens=3000, stream=i % 2 == 0)
                    with httpx2.stream("POST", f"{url}/v1/completions", json=fields, timeout=SECONDS) as answer:
                        failed = answer.status_code >= 500 or '"error"' in answer.read().decode()
                except httpx2.HTTPError:
                    failed = True
                ends.append(time.monotonic() if failed else float("inf"))

            runs = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
            for run in runs:
                run.start()
            server.wait(lambda now: now["num_requests_running"] == clients)
            begin = time.monotonic()
            os.kill(server.engine, signal.SIGKILL)
            for run in runs:
                run.join()
            how = f"S5 the engine is killed, --restart {restarts}"
            rows.append(
                Row(f"{how}: seconds until the last of {clients} clients has an error", max(ends) - begin, Goal(high=5))
            )
            if restarts:
                differs = _text_again(server, want, begin)
                rows += [Row(f"{how}: seconds until requests are answered", time.monotonic() - begin)]
                rows += [Row(f"{how}: texts that differ afterwards", float(differs), NONE)]
            else:
                code = server.process.wait(SECONDS)
                rows += [Row(f"{how}: seconds until the server has ended", time.monotonic() - begin, Goal(high=10))]
                rows += [Row(f"{how}: exit code", code, Goal(low=1))]
        rows.append(Row(f"{how}: lines of the log that name the signal", log.read_text().count("SIGKILL"), ALL))
    return rows


def _text_again(server: Server, want: str, begin: float) -> bool:
    """Whether the text differs once the engine answers again."""
    while time.monotonic() - begin < SECONDS:
        try:
            return server.text("it was") != want
        except httpx2.HTTPError:
            time.sleep(0.1)
    return True


def s11(place: Path, loads: int = 200) -> list[Row]:
    """Adapters are loaded and unloaded under load."""
    model = write_model(place / "model")
    for i in range(2):
        adapted = dt.load(model)
        dt.attach(adapted, {"kind": "lora", "rank": 2 + 3 * i})
        with torch.no_grad():
            for tensor in adapter_tensors(adapted).values():
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)), alpha=0.2)
        dt.save_adapter(adapted, place / "adapters" / str(i), base=model)
    (place / "admin").write_text("admin\n")
    flags = (f"--adapter-root={place}/adapters", f"--admin-key-file={place}/admin")
    with served(model, "--queued=256", *flags) as server:
        prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(loads)]
        want = asyncio.run(texts_of(server, prompts, max_tokens=16))
        got: list[str] = []
        run = threading.Thread(target=lambda: [got.extend(asyncio.run(texts_of(server, prompts, max_tokens=16))) for _ in "ab"])
        run.start()
        refused = 0
        with httpx2.Client(base_url=server.url, timeout=SECONDS, headers=KEY) as admin:
            for i in range(loads):
                loaded = admin.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": str(i % 2)})
                used = admin.post("/v1/completions", json={**body("it was", max_tokens=2), "model": "one"})
                gone = admin.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
                refused += (loaded.status_code, used.status_code, gone.status_code) != (200, 200, 200)
        run.join()
    return [
        Row(f"S11 {loads} loads, uses and unloads of adapters under load: refused", refused, NONE),
        Row(
            f"S11 of {len(got)} texts of the base, those that differ",
            sum(a != b for a, b in zip(got, want * 2, strict=True)),
            NONE,
        ),
    ]


def s12(place: Path, prompts: int = 30) -> list[Row]:
    """Prefixes that are cold, cached and evicted, with windowed layers, too."""
    rows: list[Row] = []
    for name, spec in (("full attention", None), ("windows", WINDOWS)):
        model = write_model(place / name, **({} if spec is None else {"spec": spec}))
        asked = [" ".join(PROMPTS[(i + j) % len(PROMPTS)] for j in range(6)) + f" {i}" for i in range(prompts)]
        with served(model, "--rows=2", "--longest=256", "--pages=80") as server:
            cold = [server.text(prompt, cache_salt=f"{i}") for i, prompt in enumerate(asked)]
            warm = [server.text(prompt) for prompt in asked for _ in range(2)][1::2]
            hits = server.metrics()["prefix_cache_hits_total"]
            again = [server.text(prompt) for prompt in asked]  # the cache holds a few of them: most were evicted
        differ = sum(a != b for other in (warm, again) for a, b in zip(other, cold, strict=True))
        rows.append(
            Row(f"S12 {name}: of {2 * prompts} texts, cached and evicted, those that differ from cold ones", differ, NONE)
        )
        rows.append(Row(f"S12 {name}: tokens found in the cache", hits, ALL))
    return rows


def p5(place: Path) -> list[Row]:
    """Chat templates that hurt."""
    hostile = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['sys'].exit() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    )
    stopped, slowest = 0, 0.0
    ChatTemplate("{{ 1 }}", "warm").render([{"role": "user", "content": "a"}])
    for template in hostile:
        begin = time.monotonic()
        try:
            ChatTemplate(template, "hostile").render([{"role": "user", "content": "a"}])
        except FileError:
            stopped += 1
        slowest = max(slowest, time.monotonic() - begin)
    return [
        Row(f"P5 of {len(hostile)} hostile templates, stopped", stopped, Goal(low=len(hostile))),
        Row(f"P5 seconds of the slowest; its limit is {TEMPLATE_SECONDS:g} s of CPU time", slowest, Goal(high=2)),
    ]


def p6(place: Path) -> list[Row]:
    """Texts that tokenizers take long for: twice as long takes about twice the time."""
    tokenizer = (dt.load(write_model(place / "model")).vocabulary or _no_vocabulary()).tokenizer
    assert tokenizer is not None
    worst = 0.0
    for text, count in (("a", 100_000), ("_", 50_000), (" ", 1_000_000), ("語", 40_000)):
        ratios = []
        for _ in range(5):  # both sizes in turns: a machine may change its speed
            times = []
            for n in (count // 2, count):
                begin = time.process_time()
                tokenizer.prompt(text * n)
                times.append(time.process_time() - begin)
            ratios.append(times[1] / times[0])
        worst = max(worst, statistics.median(ratios))
    return [Row("P6 the longest of four hostile texts: time of 2n characters ÷ n", worst, Goal(high=2.5))]


def p7(place: Path) -> list[Row]:
    """Schemas, patterns and grammars that blow up are refused; `(a+)+b`, which takes backtracking matchers exponential time, is
    followed in linear time. Another request is answered beside each."""
    deep = '{"properties": {"a": ' * 10_000 + '{"type": "string"}' + "}}" * 10_000
    rules = "root ::= r0\\n" + "\\n".join(f"r{i} ::= r{i + 1}" for i in range(4000))
    refusals = (
        f'"guided_json": {deep}',
        '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}',
        '"structured_outputs": {"grammar": "root ::= root"}',
        f'"structured_outputs": {{"grammar": "{rules}"}}',
        '"guided_regex": "' + "(" * 5000 + "a" + ")*" * 5000 + '"',
        '"guided_json": {"anyOf": [' + ", ".join(f'{{"properties": {{"k{i}": {{}}}}}}' for i in range(1500)) + "]}",
    )
    headers = {"Content-Type": "application/json"}
    refused, slowest, beside = 0, 0.0, 0.0

    def ask(field: str) -> httpx2.Response:
        data = f'{{"prompt": "it was", "max_tokens": 64, "temperature": 0, {field}}}'
        return httpx2.post(f"{server.url}/v1/completions", content=data, headers=headers, timeout=SECONDS)

    with served(write_model(place / "model")) as server, ThreadPoolExecutor(1) as other:
        server.text("it was", guided_regex="ready")  # the process that compiles has started
        for field in refusals:
            begin = time.monotonic()
            bystander = other.submit(lambda: (server.text("it was"), time.monotonic())[1])
            refused += ask(field).status_code == 400
            slowest = max(slowest, time.monotonic() - begin)
            beside = max(beside, bystander.result() - begin)
        begin = time.monotonic()
        followed = re.fullmatch("a+b?", ask('"guided_regex": "(a+)+b"').json()["choices"][0]["text"]) is not None
        slowest = max(slowest, time.monotonic() - begin)
        alive = bool(server.text("it was"))
    return [
        Row(f"P7 of {len(refusals)} hostile constraints, refused by 400", refused, Goal(low=len(refusals))),
        Row("P7 (a+)+b is followed", float(followed), ALL),
        Row("P7 seconds of the slowest", slowest, Goal(high=5)),
        Row("P7 seconds of the slowest request beside them", beside, Goal(high=5)),
        Row("P7 the engine answers afterwards", float(alive), ALL),
    ]


def n3(place: Path, length: int = 120) -> list[Row]:
    """Log-probs of a prompt in float64: paged and in chunks of 1, 7, 16 and 64 tokens, against a whole pass."""
    model = dt.load(write_model(place / "model"), dtype="float64")
    ids = [(7 * i + i * i) % (model.spec.vocab - 4) + 4 for i in range(length)]
    with torch.inference_mode():
        want = model(torch.tensor([ids]))[0].log_softmax(-1)
    worst = 0.0
    for budget in (1, 7, 16, 64):
        engine = Engine(model, rows=1, longest=256, budget=budget, share=False)
        engine.add(Request(id="a", prompt=tuple(ids), max_tokens=0, prompt_logprobs=0))
        outputs = [output for _ in iter(lambda: engine.busy, False) for output in engine.step()]  # noqa: B023  called at once
        scored = [one.logprob for output in outputs for one in output.prompt_logprobs]
        own = want[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        worst = max(worst, (torch.tensor(scored) - own).abs().max().item())
    return [
        Row(
            "N3 log-probs, float64, in chunks of 1, 7, 16, 64 tokens, paged: largest difference, in millionths",
            worst * 1e6,
            Goal(high=1),
        )
    ]


def n7(place: Path, trials: int = 50) -> list[Row]:
    """One request in batches of 2 to 32."""
    with served(write_model(place / "model"), "--rows=32") as server:
        want, differ = server.text("It was the"), 0
        for trial in range(trials):
            others = [f"{PROMPTS[(trial + i) % len(PROMPTS)]} {i}" for i in range(1 + trial % 31)]
            differ += asyncio.run(texts_of(server, ["It was the", *others], max_tokens=32, cache_salt=f"{trial}"))[0] != want
    return [Row(f"N7 one request in {trials} batches of 2 to 32: texts that differ", differ, NONE)]


def _no_vocabulary() -> Any:
    raise SystemExit("the model has no tokenizer")
