"""Processes of benchmarks/unrun.py: each in a session of its own, with stdin closed, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = "dovetail.__main__"  # what the processes run: measured.py counts its files as measured
ENDING = 60.0  # seconds that a process has after SIGTERM


class Done(NamedTuple):
    """How a process ended: its exit code, None if it was ended at the limit, and what it printed."""

    code: int | None
    out: str


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def started(args: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in a session of its own, and the file of its output; its group is ended with the block."""
    with tempfile.NamedTemporaryFile(prefix="out-", dir=folder.parent, delete=False) as log:
        process = subprocess.Popen(
            args,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, Path(log.name)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process by SIGTERM, and what is left of its group by SIGKILL."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(ENDING)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def finished(args: Sequence[str], folder: Path, env: Mapping[str, str], limit: float) -> Done:
    """Run a process until it exits or the limit ends it."""
    with started(args, folder, env) as (process, log):
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
    return Done(code, log.read_text(encoding="utf-8", errors="replace"))


def ask(port: int, path: str, key: str = "", data: Any = None, seconds: float = 60.0) -> Any:
    """The answer of a server on 127.0.0.1: JSON, or None for an empty one."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", None if data is None else json.dumps(data).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        body = answer.read()
    return json.loads(body) if body else None


@contextlib.contextmanager
def running(text: str, folder: Path, env: Mapping[str, str], limit: float) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server from the moment that it is healthy. RuntimeError if it ends before."""
    port = int(text.rpartition("--port ")[2].split()[0])
    with started(["bash", "-c", f"exec {text}"], folder, env) as (process, log):
        deadline = time.monotonic() + limit
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{text}: no server within {limit:g} s\n{log.read_text(errors='replace')}")
            with contextlib.suppress(OSError, ValueError):
                ask(port, "/health", seconds=5.0)
                break
            time.sleep(0.2)
        yield process, log


def serve(text: str, folder: Path, env: Mapping[str, str], limit: float) -> Done:
    """Start a server, ask for one answer, end it; its exit code, or 1 where it gave no answer."""
    text = text.partition("#")[0].strip().removesuffix("&").strip()  # a shell would exit and leave the server
    text += "" if "--port" in text else f" --port {free_port()}"
    port = int(text.rpartition("--port ")[2].split()[0])
    match = re.search(r"--api-key-file (\S+)", text)
    key = (folder / match[1]).read_text().split()[0] if match else ""
    try:
        with running(text, folder, env, limit) as (process, log):
            name = ask(port, "/v1/models", key)["data"][0]["id"]
            fields = {"model": name, "prompt": "Once upon", "max_tokens": 4}
            answer = ask(port, "/v1/completions", key, fields, limit)["choices"][0]
            code = end(process)
        return Done(code, f"{log.read_text(errors='replace')}\nanswered {answer['text']!r}, exit code {code}")
    except (RuntimeError, OSError, ValueError, KeyError, IndexError) as error:
        return Done(1, str(error))
