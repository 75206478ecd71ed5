"""Requests and outputs: what the HTTP side and the engine exchange. Plain data, which crosses a pipe as JSON (no pickle).

engine.add(Request(id="a", prompt=[1, 5, 9], max_tokens=32))
engine.step() -> [Output(id="a", index=0, tokens=[7]), …]            the last output of each index has a `finish`

Admission: a request that an engine can never run is refused when it is added, with the reason.

Messages between the HTTP side and the engine's process: JSON objects, each behind its length in four bytes. No pickle.

to the engine      {"add": {…request…}}   {"abort": id}   {"close": true}   {"cancel": number}
                   {"call": number, "load": name, "directory": …}   {"call": number, "unload": name}
                   {"call": number, "embed": [[ids], …], "adapter": …}
                   {"call": number, "score": [[[ids], [types]], …], "adapter": …}
from the engine    {"ready": {"longest": …, "vocab": …, "ranks": …}}   {"outputs": [{…}], "stats": {…}}
                   {"refused": id, "message": …}   {"answer": number, "error": message, "value": …}   {"fatal": message}
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords
from dovetail.base.limits import REQUEST_N
from dovetail.decoding.sampling import GREEDY, Sampling

if TYPE_CHECKING:
    from dovetail.serving.engine import Engine


import json
import socket
import struct

Finish = Literal["stop", "length", "abort", "error", "refused"]  # refused: its grammar took too much work at a token


@checks_keywords
@dc.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how it is continued."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int  # of each continuation; 0 with `prompt_logprobs`: the prompt is only scored
    sampling: Sampling = GREEDY
    n: int = 1  # continuations; number i has the seed of the sampling plus i
    stop: frozenset[int] = frozenset()  # tokens that end a continuation, and are its last token
    min_tokens: int = 0  # tokens before any of `stop` may be sampled
    logprobs: int | None = None  # report the log-prob of each token, and so many of the largest
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt, from the second on
    salt: str = ""  # prefixes are shared among requests of the same salt and adapter alone
    adapter: str | None = None
    grammar: str = ""  # the texts that are allowed, in llguidance's form; "": all

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        bias = sorted(self.sampling.logit_bias.items())  # pairs: JSON has no whole numbers as keys
        sampling = {**dc.asdict(self.sampling), "logit_bias": bias}
        return {**dc.asdict(self), "sampling": sampling, "prompt": list(self.prompt), "stop": sorted(self.stop)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """Read plain data."""
        sampling = Sampling(**{**data["sampling"], "logit_bias": {int(i): b for i, b in data["sampling"]["logit_bias"]}})
        given = {"sampling": sampling, "prompt": tuple(data["prompt"]), "stop": frozenset(data["stop"])}
        return cls(**{**data, **given})


@dc.dataclass(frozen=True, slots=True)
class Logprob:
    """The log-prob of a token under the model (before temperature and penalties), and the largest ones of its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dc.dataclass(frozen=True, kw_only=True)
class Output:
    """New tokens of one continuation of a request."""

    id: str
    index: int = 0  # which of the n continuations
    tokens: list[int] = dc.field(default_factory=list)
    logprobs: list[Logprob] = dc.field(default_factory=list)  # one per token, where the request asks for them
    prompt_logprobs: list[Logprob] = dc.field(default_factory=list)  # with the first output
    finish: Finish | None = None
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    message: str = ""  # of an error
    queue_seconds: float | None = None  # until it had a row, with the first tokens
    prefill_seconds: float | None = None  # from there to the first tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dc.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Output:
        """Read plain data."""
        read = {name: [_logprob(one) for one in data[name]] for name in ("logprobs", "prompt_logprobs")}
        return cls(**{**data, **read})


def _logprob(data: Mapping[str, Any]) -> Logprob:
    return Logprob(data["token"], data["logprob"], [(int(token), value) for token, value in data["top"]])


def check_request(engine: Engine, request: Request) -> None:
    """Raise InputError where a request can never run."""
    spec, prompt, longest, pool = engine.model.part, request.prompt, engine.longest, engine.runner.pool
    encoder = spec.encoder is not None
    before = len(engine.start) if encoder else len(prompt)
    sizes = f"{before} tokens of the prompt and {request.max_tokens} new ones"
    rules = [
        (
            request.id in engine.requests or any(output.id == request.id for output in engine.late),
            f"id: {request.id!r} is running already",
        ),
        (not prompt, "prompt: is empty; give at least one token"),
        (
            min(prompt, default=0) < 0 or max(prompt, default=0) >= spec.vocab,
            f"prompt: has a token id outside 0 to {spec.vocab - 1}",
        ),
        (not 1 <= request.n <= REQUEST_N, f"n: {request.n} is not from 1 to {REQUEST_N}"),
        (
            request.max_tokens < (0 if request.prompt_logprobs is not None else 1),
            f"max_tokens: {request.max_tokens} is not 1 or more; 0 if the prompt is only scored",
        ),
        (
            encoder and (not engine.start or len(prompt) > longest),
            f"prompt: has {len(prompt)} tokens; at most {longest}, and a first decoder token, are needed",
        ),
        (before < pool.ahead, f"prompt: has {before} tokens; the first {pool.ahead} see each other, so give as many"),
        (before + request.max_tokens > longest, f"max_tokens: {sizes} are more than {longest}; shorten one of them"),
        (
            not engine.runner.fits(before + max(request.max_tokens, 1)),  # one is admitted with room for a token
            f"max_tokens: {before + request.max_tokens} tokens do not fit into the KV cache; request fewer",
        ),
    ]
    for never_runs, problem in rules:
        if never_runs:
            raise InputError(problem)


LENGTH = struct.Struct("<I")
MOST = 64 << 20  # bytes of one message: prompts and log-probs of a step are far below


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MOST:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MOST}")
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Collects bytes and returns the messages that are whole."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def push(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes; returns the messages that they complete."""
        self.buffer += data
        messages: list[dict[str, Any]] = []
        while len(self.buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.buffer)
            if length > MOST:
                raise ValueError(f"a message of {length} bytes; the limit is {MOST}")
            end = LENGTH.size + length
            if len(self.buffer) < end:
                break
            messages.append(json.loads(self.buffer[LENGTH.size : end]))
            del self.buffer[:end]
        return messages


def received(sock: socket.socket, inbox: Inbox, wait: bool) -> list[dict[str, Any]] | None:
    """The messages that are there, waiting for one if `wait`; None where the other side has closed."""
    messages: list[dict[str, Any]] = []
    sock.setblocking(wait)
    while True:
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            return messages
        if not data:
            return None
        messages += inbox.push(data)
        if wait and messages:
            sock.setblocking(False)
            wait = False
