"""The app before the replicas. It reads the body, names the prefixes of the prompt and passes the request on.

    client -> Guard (host, origin, API key) -> Relay -> `ask`, which chooses a replica -> `answer` there

A replica that is lost before the first part of its response is asked again elsewhere: generating a text has no effect but the
text. Behind it, a stream ends with an error event and [DONE], and a whole answer with a closed connection. A client that goes
away cancels the call, and so the request in the engine.

A request in a replica: the app answers a call that came as one message, and its response goes back in parts.

    caller          ReplicaCall ->                             -> app(scope, receive, send)
                    <- start, body, body …, body        <- send

The caller that stops early cancels the app, which aborts the request in the engine.

Which replica a prompt goes to: the one whose prefix cache has most of it, unless it is much busier than the others.

    key_0 = hash(API key, model)        key_i = hash(key_{i-1}, characters 64·(i-1) to 64·i of the prompt)

64 characters are about 16 tokens, two pages of the KV cache. Two prompts share key_i where their first 64·i characters are
the same, so the longest known key names the replica. Prompts of two API keys share no key, as the engine shares no prefix
between them. It is a guess of what a cache has: the router does not ask the replicas, and forgets the keys used longest ago.

The metrics of all replicas in one page: each sample has the label `replica`, so that Prometheus can sum or compare them.
"""

from __future__ import annotations

import asyncio
import dataclasses as dc
import json
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.base.limits import REQUEST_ITEMS
from dovetail.serving.http.body import ClientGone, read_bytes
from dovetail.serving.http.errors import ApiError, as_api_error
from dovetail.serving.http.guard import OPEN, READING, TENANT
from dovetail.serving.http.respond import DONE, while_connected

METRICS = "/metrics"
TRIES = 3  # replicas that a request is sent to
HEALTH_SECONDS = 2.0  # in which a replica answers for all of them
STREAM = b"text/event-stream"


class ReplicaLost(Exception):
    """The replica of a call has ended, or cannot be reached."""


class Relay:
    """Passes requests to replicas. It runs behind a Guard."""

    def __init__(
        self, ask: Callable[[ReplicaCall], AsyncGenerator[Message, None]], metrics: Callable[[], Awaitable[bytes]]
    ) -> None:
        """`ask` yields the parts of a replica's response; it raises ReplicaLost, and Busy where no replica takes more.
        `metrics` returns those of all replicas."""
        self.ask, self.metrics = ask, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        started: list[Message] = []

        async def sent(part: Message) -> None:
            if part["type"] == "http.response.start":
                started.append(part)
            await send(part)

        try:
            if scope["path"] == METRICS and scope["method"] in READING:
                page = Response(await self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
                return await page(scope, receive, send)
            call = await self._call(request)
            await while_connected(request, self._pass(call, sent, started))
        except ClientGone:
            pass
        except Exception as error:
            await _end(as_api_error(error), started, scope, receive, send)

    async def _call(self, request: Request) -> ReplicaCall:
        scope, reads = request.scope, request.method in READING
        body = b"" if reads else await read_bytes(request)
        return ReplicaCall(
            method=request.method,
            path=scope["path"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            query=scope.get("query_string", b""),
            body=body,
            keys=prefix_keys(scope.get(TENANT, ""), body) if body else (),
        )

    async def _pass(self, call: ReplicaCall, send: Send, started: list[Message]) -> None:
        seconds = HEALTH_SECONDS if call.path == OPEN else None
        try:
            async with asyncio.timeout(seconds):
                for _ in range(TRIES):
                    try:
                        async with aclosing(self.ask(call)) as parts:
                            async for part in parts:
                                await send(part)
                        return
                    except ReplicaLost:
                        if started:
                            raise ApiError(503, "the replica was lost in mid-answer", code="replica_lost") from None
        except TimeoutError:
            pass
        raise ApiError(503, "no replica answers", code="no_replica", headers={"Retry-After": "5"})


async def _end(error: ApiError, started: list[Message], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error; in mid-stream, send it as an event; in a whole answer that has begun, close the connection."""
    if not started:
        await error.response()(scope, receive, send)
    elif dict(started[0]["headers"]).get(b"content-type", b"").startswith(STREAM):
        event = b"data: " + json.dumps(error.data()).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": event + DONE, "more_body": False})
    else:
        raise error


@dc.dataclass(frozen=True, kw_only=True)
class ReplicaCall:
    """An HTTP request with its whole body."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    query: bytes = b""
    body: bytes = b""
    keys: tuple[bytes, ...] = ()  # of its prompt (`prefix_keys`)

    def scope(self) -> Scope:
        """Return the ASGI scope."""
        about = {"http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None}
        path = {"path": self.path, "raw_path": self.path.encode(), "query_string": self.query}
        asgi = {"version": "3.0", "spec_version": "2.3"}
        return {"type": "http", "asgi": asgi, "method": self.method, **path, "headers": list(self.headers), **about}


async def answer(app: ASGIApp, call: ReplicaCall) -> AsyncGenerator[Message, None]:
    """Yield the parts of the response of an app. Raises what the app raises."""
    parts: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies = [call.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await asyncio.Event().wait()  # the caller that goes away cancels the task
        raise AssertionError

    async def run() -> None:
        try:
            await app(call.scope(), receive, parts.put)
        finally:
            parts.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await task
    finally:
        task.cancel()
        with suppress(BaseException):
            await task


BLOCK = 64  # characters per key
BLOCKS = 1024  # keys of one prompt: beyond them, prompts are not told apart
KEYS = 1 << 18  # that a router remembers
FIELDS = ("messages", "prompt", "input")  # of a body, which have the prompt


def prefix_keys(tenant: str, body: bytes) -> tuple[bytes, ...]:
    """Return a key per block of a request's prompt; none where the body has no prompt, which the replica refuses."""
    if sum(body.count(sign) for sign in (b"[", b"{", b",")) > REQUEST_ITEMS:
        return ()
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(data, dict):
        return ()
    text = next((_text(data[name]) for name in FIELDS if name in data), "")[: BLOCK * BLOCKS]
    key, keys = _hash(b"", repr((tenant, data.get("model"), data.get("cache_salt")))), list[bytes]()
    for begin in range(0, len(text) - BLOCK + 1, BLOCK):
        key = _hash(key, text[begin : begin + BLOCK])
        keys.append(key)
    return tuple(keys)


def _text(prompt: object) -> str:
    """A string that begins alike for prompts that begin alike: JSON of a list, without its last bracket."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)[:-1]


def _hash(before: bytes, text: str) -> bytes:
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Placement:
    """The replica that each prefix went to last."""

    def __init__(self, slack: int = 4, limit: int = KEYS) -> None:
        """`slack`: a replica with so many requests more than the least busy one gets no further ones for its prefixes."""
        self.slack, self.limit = slack, limit
        self.places: OrderedDict[bytes, str] = OrderedDict()  # the key used longest ago is first

    def find(self, keys: Sequence[bytes], replicas: Container[str]) -> str | None:
        """Return the replica that has the longest known prefix."""
        for key in reversed(keys):
            if (place := self.places.get(key)) is not None and place in replicas:
                return place
        return None

    def record(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember where a prompt went. Its first keys are the newest, so that a chain is forgotten from its end."""
        for key in reversed(keys):
            self.places[key] = replica
            self.places.move_to_end(key)
        while len(self.places) > self.limit:
            self.places.popitem(last=False)

    def ranks(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[list[str]]:
        """Return the replicas in the order in which a prompt may go to them; `loads` are their requests in flight. Of a
        rank, the least busy one is to be taken, and of several such the first: their order is random."""
        every = random.sample(list(loads), len(loads))
        place = self.find(keys, loads)
        if place is None:
            return [every]
        others = [one for one in every if one != place]
        return [others, [place]] if loads[place] - min(loads.values()) > self.slack else [[place], others]


LABEL = "replica"


class Merged(Collector):
    """The families of several pages."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self.pages = pages

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica, page in self.pages.items():
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, LABEL: replica}, sample.value)
        yield from families.values()


def merge(pages: Mapping[str, str]) -> bytes:
    """Return one page of metrics from the pages of replicas, which are given by name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(pages))
    return generate_latest(registry)
