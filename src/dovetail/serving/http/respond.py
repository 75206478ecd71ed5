"""Responses: a whole answer, or server-sent events. A client that goes away cancels its run in either case.

    data: {chunk}⏎⏎ … data: [DONE]⏎⏎         an error in mid-stream is a `data:` line with an error object, then [DONE]

The first piece is awaited before the status is sent, so that a full queue or a dead engine is a status and not an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from dovetail.serving.http.body import ClientGone
from dovetail.serving.http.choice import Piece
from dovetail.serving.http.errors import as_api_error
from dovetail.serving.http.run import Run
from dovetail.serving.http.shapes import Shape

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def respond(request: Request, run: Run, shape: Shape, stream: bool) -> Response:
    """Run the jobs and return the answer."""
    headers = {"X-Request-Id": shape.id}
    if not stream:
        pieces = await while_connected(request, _all(run))
        return JSONResponse(shape.whole(pieces), headers=headers)
    pieces = run.pieces()
    try:
        first = await while_connected(request, _next(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(_events(first, pieces, shape), headers={**headers, "Cache-Control": "no-cache"})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; cancel it and raise ClientGone where the client closes the connection first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all(run: Run) -> list[Piece]:
    async with contextlib.aclosing(run.pieces()) as pieces:
        return [piece async for piece in pieces]


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece | None:
    return await anext(pieces, None)


async def _events(first: Piece | None, pieces: AsyncGenerator[Piece, None], shape: Shape) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(pieces):
            for chunk in shape.opening():
                yield _event(chunk)
            if first is not None and (chunk := shape.chunk(first)) is not None:
                yield _event(chunk)
            async for piece in pieces:
                if (chunk := shape.chunk(piece)) is not None:
                    yield _event(chunk)
        for chunk in shape.closing():
            yield _event(chunk)
    except Exception as error:
        yield _event(as_api_error(error).data())
    yield DONE


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, whose source is closed in every case: Starlette leaves that to the garbage collector."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)
