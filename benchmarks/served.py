"""A real `dovetail serve` process on a small trained model, and what a benchmark asks of it: answers, metrics, memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

TEXT = (
    "It was the best of times 🙂, it was the worst of times 🐈‍⬛, über allen Gipfeln 日本語 ist Ruh 👩‍👩‍👧; it was the age.\n"
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SPEC = "{width: 32, vocab: 400, layers: [{repeat: 2, mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}]}"
WINDOWS = (
    "{width: 32, vocab: 400, layers: [{repeat: 2, mixer: {heads: 2, head: 16, mask: [causal, {kind: window, size: 24}]},"
    " ffn: {hidden: 64}},"
    " {mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}]}"
)
SECONDS = 300.0  # until a request must be answered


def write_model(place: Path, spec: str = SPEC) -> Path:
    """Write a model that has learned a text with emoji, with its tokenizer and a chat template."""
    torch.manual_seed(0)
    tokenizer = learn(TEXT * 20, 400)
    model = dt.build(dt.from_yaml(spec).set("vocab", tokenizer.size), seed=1).train()
    windows = tokenizer.encode(TEXT * 6).unfold(0, 48, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        model.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.vocabulary = Vocabulary(tokenizer=tokenizer, stop=frozenset([tokenizer.id_of(END)]))
    dt.save(model.eval(), place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


class Server:
    """One server: its URL, its process and that of its engine."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.rpartition(":")[2])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        named = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        (self.engine,) = [pid for pid, command in named.items() if b"dovetail.api.engine" in command]

    def client(self, connections: int = 200) -> httpx2.AsyncClient:
        """An HTTP client that keeps so many connections."""
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx2.AsyncClient(base_url=self.url, timeout=SECONDS, limits=limits)

    def metrics(self) -> dict[str, float]:
        """The values of /metrics without labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=SECONDS).text
        found = re.findall(r"^dovetail:(\w+)\{model_name=\"[^\"]*\"\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def memory(self) -> float:
        """Resident MB of the server and its engine."""
        return sum(_resident(pid) for pid in (self.process.pid, self.engine))

    def text(self, prompt: str, **more: Any) -> str:
        """The text of one greedy completion, asked alone."""
        answer = httpx2.post(f"{self.url}/v1/completions", json=body(prompt, **more), timeout=SECONDS)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    def raw(self, fields: dict[str, Any]) -> socket.socket:
        """A socket on which a completion was asked for, and of which nothing was read."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.sendall(message(json.dumps(fields).encode()))
        return sock

    @contextlib.contextmanager
    def health(self, every: float) -> Iterator[list[float]]:
        """The seconds of each answer of /health inside the block, asked by a thread."""
        times, done = list[float](), threading.Event()

        def watch() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
            while not done.is_set():
                begin = time.monotonic()
                connection.request("GET", "/health")
                connection.getresponse().read()
                times.append(time.monotonic() - begin)
                done.wait(every)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield times
        finally:
            done.set()
            thread.join()

    def wait(self, until: Any, seconds: float = 60.0) -> float:
        """Poll the metrics until `until(metrics)`; the seconds that it took."""
        begin = time.monotonic()
        while not until(self.metrics()):
            if time.monotonic() - begin > seconds:
                raise SystemExit(f"the server did not get there within {seconds:g} s: {self.metrics()}")
            time.sleep(0.01)
        return time.monotonic() - begin


def message(data: bytes) -> bytes:
    """The bytes of an HTTP request for a completion, on a connection that closes behind its answer."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def body(prompt: str, **more: Any) -> dict[str, Any]:
    """The fields of a greedy completion that does not end early."""
    return {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, **more}


@contextlib.contextmanager
def served(place: Path, *flags: str, log: Path | None = None) -> Iterator[Server]:
    """A server of a model directory, until the block ends; its log goes to a file."""
    command = [sys.executable, "-m", "dovetail", "serve", str(place), "--port=0", "--threads=1", "--json", *flags]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((Path(os.devnull) if log is None else log).open("w"))
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True))
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with exit code {process.wait()}")
        server = Server(process, json.loads(line)["url"].removesuffix("/v1"))
        try:
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def _resident(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0
