"""A real `dovetail serve` process of a model directory, with its engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai

import dovetail as dt
from dovetail.decoding.generation import Vocabulary


class Real:
    """A running server, and clients of it."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.process = url, process
        self.http = httpx2.Client(base_url=url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        self.model = self.openai.models.list().data[0].id

    def complete(self, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"temperature": 0, "max_tokens": 12, **fields})

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/chat/completions", json={"temperature": 0, "max_tokens": 12, **fields})


def write_directory(model: dt.Transformer, vocabulary: Vocabulary, place: Path, template: str) -> Path:
    model.vocabulary = vocabulary
    dt.save(model, place)
    (place / "chat_template.jinja").write_text(template)
    return place


@contextlib.contextmanager
def real_server(directory: Path, *flags: str) -> Iterator[Real]:
    command = [sys.executable, "-m", "dovetail", "serve", str(directory), "--port=0", "--threads=1", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        real = Real(json.loads(process.stdout.readline())["url"].removesuffix("/v1"), process)
        try:
            yield real
        finally:
            real.http.close()
            real.openai.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
