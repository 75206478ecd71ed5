"""Bodies: read with a limit on bytes while they arrive, on time and on items, and parsed by a schema.

A body that is too large is read further and dropped, up to a limit: a server that closes the connection while its client still
sends resets it, and the client never reads the answer.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from dovetail.base.limits import REQUEST_BYTES, REQUEST_DISCARDED, REQUEST_ITEMS, REQUEST_SECONDS
from dovetail.serving.http.errors import ApiError, Unreadable

M = TypeVar("M", bound=BaseModel)
CLOSE = {"Connection": "close"}


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(request: Request, schema: type[M]) -> M:
    """Return the body of a request; ApiError 400, 408, 413 or 415 where there is none."""
    data = await read_bytes(request)
    items = sum(data.count(sign) for sign in (b"[", b"{", b","))
    if items > REQUEST_ITEMS:
        raise ApiError(413, f"the body has up to {items:,} items; the limit is {REQUEST_ITEMS:,}")
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise Unreadable(error) from None


async def read_bytes(request: Request) -> bytes:
    """Return the bytes of a JSON body; ApiError 408, 413 or 415 where there are none."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body is not JSON by its header; send Content-Type: application/json", headers=CLOSE)
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await _bytes(request)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {REQUEST_SECONDS:g} s", headers=CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _bytes(request: Request) -> bytes:
    data, total = bytearray(), 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= REQUEST_BYTES:
            data += chunk
        elif data:
            data = bytearray()
        if total > REQUEST_DISCARDED:
            break
    if total > REQUEST_BYTES:
        raise ApiError(413, f"the body has more than {REQUEST_BYTES:,} bytes", code="body_too_large", headers=CLOSE)
    return bytes(data)
