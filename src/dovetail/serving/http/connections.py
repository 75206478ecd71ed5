"""Connections: bounds on what a client holds open without a request that is being answered. uvicorn has none of them.

    REQUEST_HEADER_SECONDS    from the connection, or from the end of an answer, until headers are complete; then 408
    REQUEST_HEADER_BYTES      of these headers; more are answered with 431
    per address               connections open at once (--address-connections); more are answered with 429
    CONNECTIONS               of all addresses; more are answered with 503
    LINGER_SECONDS, _BYTES    what is read and dropped after the answer to bad headers: TCP resets a connection that is closed
                              with unread bytes, and the client may then never see the answer

An address is an IPv4 address or an IPv6 network of 64 bits, which is what one client is given.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from collections import Counter
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dovetail.base.limits import REQUEST_HEADER_BYTES, REQUEST_HEADER_SECONDS
from dovetail.serving.client import LOG
from dovetail.serving.http.errors import ApiError

CONNECTIONS = 4096  # open at once
LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 20
NETWORK_BITS = 64  # of an IPv6 address


def bounded_protocol(per_address: int) -> type[H11Protocol]:
    """Return the protocol of a server whose clients have at most `per_address` connections per address."""
    open_connections: Counter[str] = Counter()

    class Bounded(BoundedProtocol):
        most, opened = per_address, open_connections

    return Bounded


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol on h11, with a deadline for headers and limits on connections."""

    most: int
    opened: Counter[str]
    deadline: asyncio.TimerHandle | None = None
    address: str | None = None  # under which the connection is counted
    lingers: int | None = None  # bytes that are still dropped before it is closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it."""
        super().connection_made(transport)
        address = None if self.client is None else _network(self.client[0])
        if len(self.connections) > CONNECTIONS:
            return self._refuse(ApiError(503, f"the server has {CONNECTIONS:,} connections open; try again later"))
        if address is not None and self.opened[address] >= self.most:
            problem = f"this address has {self.most:,} connections open; close some, or start the server with a larger"
            return self._refuse(ApiError(429, f"{problem} --address-connections", code="too_many_connections"))
        if address is not None:
            self.opened[address] += 1
            self.address = address
        return self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, or drop it after the answer to bad headers."""
        if self.lingers is None:
            return super().data_received(data)
        self.lingers -= len(data)
        return self.transport.close() if self.lingers < 0 else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the end of the connection."""
        self._disarm()
        if self.address is not None:
            self.opened[self.address] -= 1
            if not self.opened[self.address]:
                del self.opened[self.address]
            self.address = None
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Parse what has arrived; headers that are complete have met their deadline."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()

    def on_response_complete(self) -> None:
        """Wait for the next request of the connection; one that was pipelined has begun already."""
        self._arm()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, or headers that are too long (431). uvicorn calls it while it handles h11's error."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return self._refuse(headers_too_long(), lingers=True)
        return self._refuse(ApiError(400, msg), lingers=True)

    def _arm(self) -> None:
        self._disarm()
        self.deadline = self.loop.call_later(REQUEST_HEADER_SECONDS, self._too_late)

    def _disarm(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _too_late(self) -> None:
        self.deadline = None
        self._refuse(ApiError(408, f"no complete headers of a request within {REQUEST_HEADER_SECONDS:g} s"))

    def _refuse(self, error: ApiError, *, lingers: bool = False) -> None:
        """Answer and close; after an answer whose request has not been read to its end, only close."""
        if self.transport.is_closing() or self.lingers is not None:
            return
        LOG.info("connection of %s refused: %d %s", self.address or "a client", error.status, error)
        body = json.dumps(error.data()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        parts: list[Any] = [
            h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        if not lingers:
            self.transport.close()
            return
        self._disarm()
        self.lingers = LINGER_BYTES
        self.transport.write_eof()
        self.deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def headers_too_long() -> ApiError:
    """Return the error of headers that are too long."""
    problem = f"the headers have more than {REQUEST_HEADER_BYTES:,} bytes"
    return ApiError(431, problem, code="headers_too_long", headers={"Connection": "close"})


def _network(host: str) -> str:
    """Return what an address is counted as."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, NETWORK_BITS), strict=False))
