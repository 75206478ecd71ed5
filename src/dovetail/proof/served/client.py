"""The one way to a server: every request passes `complete`, `stream` or `abort`, is bounded and counted.

`DryRun` has the same methods and sends nothing: the laws run on it first, so that the number of requests and tokens is known
before the first one is sent, without a second list of what each law asks.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.base.errors import FileError
from dovetail.proof.answers import Answer, TokenStep, choices_of, joined
from dovetail.proof.http import Http

PATH = "/completions"
MAX_REQUESTS = 5000  # to one server, in one run
Body = Mapping[str, Any]


class ServerClient(ABC):
    """A server, or a dry run. It counts requests and tokens; `sent` is called after each request."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.new_tokens = 0
        self.sent: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    @abstractmethod
    def complete(self, body: Body) -> list[Answer]:
        """The choices of a completion."""

    @abstractmethod
    def stream(self, body: Body) -> Answer:
        """The answer of a stream, read to its end."""

    @abstractmethod
    def abort(self, body: Body, events: int) -> None:
        """Begin a stream, and close the connection after this many events."""

    @abstractmethod
    def flush(self, path: str) -> bool:
        """Empty the prefix cache by a path at the server's root; False where it has none."""

    def count(self, body: Body) -> None:
        """Count a request; FileError beyond the limit."""
        prompts = prompts_of(body)
        with self.lock:
            self.requests += 1
            self.prompt_tokens += sum(length_of(prompt) for prompt in prompts)
            self.new_tokens += len(prompts) * body.get("n", 1) * body["max_tokens"]
            if self.requests > MAX_REQUESTS:
                raise FileError(f"more than {MAX_REQUESTS:,} requests in one run; choose laws with --only")
            self.sent()


def prompts_of(body: Body) -> list[Any]:
    """The prompts of a request: one, or those of a list."""
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]


def length_of(prompt: Any) -> int:
    """The number of tokens of a prompt; of text, about one per four characters."""
    return len(prompt) // 4 + 1 if isinstance(prompt, str) else len(prompt)


class HttpClient(ServerClient):
    """A running server."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        super().__init__()
        self.http = Http(url, key)

    def complete(self, body: Body) -> list[Answer]:
        try:
            return choices_of(self.http.post(PATH, body))
        finally:
            self.count(body)

    def stream(self, body: Body) -> Answer:
        try:
            return joined(self._events(body))
        finally:
            self.count(body)

    def abort(self, body: Body, events: int) -> None:
        stream = self._events(body)
        try:
            for _ in itertools.islice(stream, events):
                pass
        finally:
            stream.close()
            self.count(body)

    def flush(self, path: str) -> bool:
        """Empty the prefix cache by a path at the server's root; False where it has none."""
        root = dc.replace(self.http, url=self.http.url.rstrip("/").removesuffix("/v1"))
        try:
            with root.exchange(path, {}) as (_, response):
                return response.status == 200
        except FileError:
            return False

    def _events(self, body: Body) -> Any:
        return self.http.events(PATH, {**body, "stream": True})


class DryRun(ServerClient):
    """A server that only counts: its answers have the right shapes and no meaning."""

    TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of it; "

    def complete(self, body: Body) -> list[Answer]:
        self.count(body)
        return [self._answer(prompt, body) for prompt in prompts_of(body) for _ in range(body.get("n", 1))]

    def stream(self, body: Body) -> Answer:
        return self.complete(body)[0]

    def abort(self, body: Body, events: int) -> None:
        self.count(body)

    def flush(self, path: str) -> bool:
        return True

    def _answer(self, prompt: Any, body: Body) -> Answer:
        tokens = [7] * body["max_tokens"]
        if body.get("echo"):
            tokens = [*(prompt if isinstance(prompt, list) else [7] * length_of(prompt)), *tokens]
        steps = tuple(TokenStep(token, -1.0, {token: -1.0, 8: -2.0}) for token in tokens)
        text = (self.TEXT * (len(tokens) // 20 + 1))[: 4 * len(tokens)]
        return Answer(steps, text, tuple(tokens), "length", cached=64)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds that it took."""
    begin = time.perf_counter()
    return run(), time.perf_counter() - begin
