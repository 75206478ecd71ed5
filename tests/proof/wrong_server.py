"""The engine of wrong_engine.py behind OpenAI's completions, on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from wrong_engine import VOCAB, Engine, Sequence

LETTERS = "abcdefghijklmnop"
NAMES = [f"{LETTERS[i // 16]}{LETTERS[i % 16]} " for i in range(VOCAB)]  # the text of each token
STREAM_PACE = 0.002  # seconds per streamed event
KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "logprobs", "echo", "n", "seed", "stop", "stream", "top_p"),
    *("presence_penalty", "frequency_penalty"),
}
EXTRAS = {"cache_salt", "ignore_eos", "top_k", "min_p", "repetition_penalty", "return_token_ids", "return_tokens_as_token_ids"}


def held_back(text: str, stops: Iterable[str]) -> int:
    """The length of the longest end of a text that begins a stop string."""
    return max((k for other in stops for k in range(1, len(other)) if text.endswith(other[:k])), default=0)


class Handler(BaseHTTPRequestHandler):
    server: WrongServer
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if "models" in self.server.without:  # as mlx-lm without a cache of Hugging Face: a status, and no body
            self.send_response(200)
            self.end_headers()
            return
        self.reply({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.authorization = self.headers.get("Authorization")
        if not self.path.endswith("/completions"):
            return self.reply({"error": {"message": "no such path"}}, 404)
        refusal = server.refusal(body)
        if refusal:
            return self.reply({"error": {"message": refusal}}, 400)
        if isinstance(body["prompt"], str):
            body["prompt"] = [sum(map(ord, word)) % VOCAB for word in body["prompt"].split()]
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        n, seed = body.get("n", 1), body.get("seed")
        sequences = [
            Sequence(
                prompt,
                body["max_tokens"],
                body.get("temperature", 1.0),
                body.get("cache_salt", ""),
                None if seed is None else seed + i,
                bool(body.get("echo")),
            )
            for prompt in prompts
            for i in range(n)
        ]
        server.engine.submit(*sequences)
        if body.get("stream"):
            return self.streamed(body, sequences[0])
        choices = [self.choice(body, s, i, list(events(s))) for i, s in enumerate(sequences)]
        cached = sum(s.cached for s in sequences)
        usage = {"prompt_tokens": sum(map(len, prompts)), "prompt_tokens_details": {"cached_tokens": cached}}
        return self.reply({"object": "text_completion", "choices": choices, "usage": usage})

    def choice(self, body: dict[str, Any], s: Sequence, index: int, taken: list[tuple[int, np.ndarray]]) -> dict[str, Any]:
        text, finish = "".join(NAMES[token] for token, _ in taken), "length"
        for stop in body.get("stop") or ():
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
                while taken and len("".join(NAMES[token] for token, _ in taken[:-1])) >= len(text):
                    taken = taken[:-1]
        if "23" in self.server.engine.bugs and finish == "length":
            text = text[: len(text) - held_back(text, body.get("stop") or ())]
        if s.echo:
            shift = 0 if "20" in self.server.engine.bugs else 1  # scores[i] is the row after token i
            before = [(token, s.scores[i - shift] if i >= shift else None) for i, token in enumerate(s.prompt)]
            taken = [*before, *taken]
            text = "".join(NAMES[token] for token in s.prompt) + text
        ids = [token for token, _ in taken] if body.get("return_token_ids") else None
        return {
            "index": index,
            "text": text,
            "finish_reason": finish,
            "logprobs": logprobs(body, taken),
            **({"token_ids": ids} if ids is not None else {}),
        }

    def streamed(self, body: dict[str, Any], s: Sequence) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        bugs, stops = self.server.engine.bugs, body.get("stop") or ()
        text, sent, first = "", 0, None
        for token, row in events(s):
            if select.select([self.connection], [], [], 0)[0]:  # the client closed the connection
                s.aborted = True
                return
            time.sleep(STREAM_PACE)
            text, first = text + NAMES[token], row if first is None else first
            stop = next((stop for stop in stops if stop in text), None)
            end = text.index(stop) if stop else len(text)
            hold = held_back(text, stops)
            ready = end if stop else end - (0 if "11" in bugs else hold)
            rows = None if "21" in bugs else logprobs(body, [(token, row)])
            if "18" in bugs and rows is not None:
                rows["top_logprobs"] = logprobs(body, [(token, first)])["top_logprobs"]
            ended = bool(stop) or (len(s.tokens) - len(s.prompt) >= s.max_tokens and len(text) == 3 * s.max_tokens)
            ready = end if ended and not ("23" in bugs and not stop) else ready
            part = {"index": 0, "text": text[sent:ready], "finish_reason": ("stop" if stop else "length") if ended else None}
            if not stop:
                part |= {"logprobs": rows, "token_ids": [token]}
            sent = max(sent, ready)
            self.event({"object": "text_completion", "choices": [part]})
            if stop:
                s.aborted = True
                break
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    def reply(self, data: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text)


def events(s: Sequence) -> Iterator[tuple[int, np.ndarray]]:
    while (event := s.events.get()) is not None:
        yield event


def logprobs(body: dict[str, Any], taken: list[tuple[int, np.ndarray | None]]) -> dict[str, Any] | None:
    count = body.get("logprobs")
    if not count:
        return None
    by_id = body.get("return_tokens_as_token_ids")
    names = [f"token_id:{i}" for i in range(VOCAB)] if by_id else NAMES
    tops: list[dict[str, float] | None] = []
    for _, row in taken:
        best = [] if row is None else np.argsort(-row)[:count]
        tops.append(None if row is None else {names[i]: float(row[i]) for i in best})
    return {
        "tokens": [names[token] for token, _ in taken],
        "token_logprobs": [None if row is None else float(row[token]) for token, row in taken],
        "top_logprobs": tops,
    }


class WrongServer(ThreadingHTTPServer):
    """`without` are fields that the server refuses, or `lists`, `ids` and `models`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bugs: set[str] | None, noise: str, speculate: bool, without: set[str], text: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = Engine(bugs, noise, speculate)
        self.without, self.text = without, text
        self.authorization: str | None = None
        self.listed = False  # whether a list of prompts was ever sent

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def refusal(self, body: dict[str, Any]) -> str | None:
        refused = [
            name for name in body if name in self.without or name not in KNOWN | EXTRAS | {"repeat_penalty", "cache_prompt"}
        ]
        if refused:
            return f"unknown field {refused[0]}"
        prompt = body["prompt"]
        self.listed |= isinstance(prompt, list) and not isinstance(prompt[0], int)
        if self.text and isinstance(prompt, str):
            return None
        if self.text or isinstance(prompt, str) or (isinstance(prompt[0], list) and "lists" in self.without):
            return "the prompt is not a list of ids"
        if body.get("n", 1) > 1 and body.get("temperature") == 0:
            return "n must be 1 when using greedy sampling"
        return None


@contextlib.contextmanager
def running(
    *bugs: str, noise: str = "bfloat16", speculate: bool = False, without: tuple[str, ...] = (), text: bool = False
) -> Iterator[WrongServer]:
    """A server with these bugs."""
    server = WrongServer(set(bugs), noise, speculate, set(without), text)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.engine.close()
        thread.join()
