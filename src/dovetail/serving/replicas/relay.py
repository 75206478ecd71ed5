"""The app before the replicas. It reads the body, names the prefixes of the prompt and passes the request on.

    client -> Guard (host, origin, API key) -> Relay -> `ask`, which chooses a replica -> answer.py in the replica

A replica that is lost before the first part of its response is asked again elsewhere: generating a text has no effect but the
text. Behind it, a stream ends with an error event and [DONE], and a whole answer with a closed connection. A client that goes
away cancels the call, and so the request in the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dovetail.serving.http.body import ClientGone, read_bytes
from dovetail.serving.http.errors import ApiError, as_api_error
from dovetail.serving.http.guard import OPEN, READING, TENANT
from dovetail.serving.http.respond import DONE, while_connected
from dovetail.serving.replicas.answer import ReplicaCall
from dovetail.serving.replicas.prefix import prefix_keys

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
