"""A request in a replica: the app answers a call that came as one message, and its response goes back in parts.

    caller          ReplicaCall ->                             -> app(scope, receive, send)
                    <- start, body, body …, body        <- send

The caller that stops early cancels the app, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses as dc
from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.types import ASGIApp, Message, Scope


@dc.dataclass(frozen=True, kw_only=True)
class ReplicaCall:
    """An HTTP request with its whole body."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    query: bytes = b""
    body: bytes = b""
    keys: tuple[bytes, ...] = ()  # of its prompt (prefix.py)

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
