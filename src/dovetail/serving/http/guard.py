"""The guard before every route: host, origin, API key, body and state of the server are checked before a route runs.

    /health          is open to all, and tells no more than a status
    Host             must be an allowed name: a page of another site that resolves to this address is refused (DNS rebinding)
    Origin           on every method but GET and HEAD, must be this server or an allowed one
    Authorization    `Bearer KEY`, compared in constant time; every route needs it, and so does a path without a route
    draining         503: the server ends after the requests in flight

It is an ASGI middleware, outside the router: a route that is added later is guarded, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.base.limits import REQUEST_HEADER_BYTES
from dovetail.serving.http.connections import headers_too_long
from dovetail.serving.http.errors import ApiError
from dovetail.serving.http.options import ANY, LOCAL, Options

OPEN = "/health"
READING = ("GET", "HEAD")
DROPPED, DROP_SECONDS = 1 << 16, 1.0  # bytes of a body that no route reads, and the time for them
ADMIN = "dovetail.admin"  # key of the scope: whether an administrator asks
TENANT = "dovetail.tenant"  # key of the scope: which API key asks, as a salt of the prefix cache


class Gate:
    """Counts the requests in flight; once it drains, no further ones are accepted."""

    def __init__(self) -> None:
        self.draining, self.count = False, 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request."""
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count its end."""
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def drained(self, seconds: float) -> bool:
        """Refuse further requests, and wait until those in flight have ended; False where some have not."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


class UnreadBody:
    """Reads what is left of a body before an answer is sent, up to a limit: a server that answers and closes while its client
    still sends resets the connection, and the client never reads the answer."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send, self.read = receive, send, False

    async def receive(self) -> Message:
        """The next message of the client."""
        message = await self._receive()
        self.read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start" and not self.read:
            await self._drop()
        await self._send(message)

    async def _drop(self) -> None:
        total = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DROP_SECONDS):
                while not self.read and total < DROPPED:
                    total += len((await self.receive()).get("body", b""))


class Guard:
    """The middleware."""

    def __init__(self, app: ASGIApp, options: Options, gate: Gate) -> None:
        self.app, self.gate = app, gate
        self.digests, self.admins = ([_digest(key) for key in keys] for keys in (options.keys, options.admin_keys))
        self.hosts = {*LOCAL, *(host.lower() for host in options.hosts)}
        self.origins = {origin.lower().rstrip("/") for origin in options.origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or answer with an error."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no route takes WebSockets
            return await send({"type": "websocket.close", "code": 1008})
        if sum(len(name) + len(value) for name, value in scope["headers"]) > REQUEST_HEADER_BYTES:  # complete in one packet
            return await headers_too_long().response()(scope, receive, send)
        if scope["path"] == OPEN:
            return await self.app(scope, receive, send)
        self.gate.enter()
        body = UnreadBody(receive, send)
        try:
            scope[TENANT], scope[ADMIN] = self.checked(scope)
        except ApiError as error:
            error.headers["Connection"] = "close"  # of a body, no more than a little is read
            await error.response()(scope, body.receive, body.send)
        else:
            await self.app(scope, body.receive, body.send)
        finally:
            self.gate.leave()
        return None

    def checked(self, scope: Scope) -> tuple[str, bool]:
        """Return the tenant of a request, and whether it is an administrator; raise ApiError where it is refused."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._allowed(host[0]):
            raise ApiError(403, "this host name is not allowed; start the server with --allow-host", code="host_not_allowed")
        if scope["method"] not in READING and not all(self._same(one, host[0]) for one in headers.getlist("origin")):
            raise ApiError(403, "requests of this origin are not allowed", code="origin_not_allowed")
        who = self._who(headers.getlist("authorization"))
        if self.gate.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        return who

    def _allowed(self, host: str) -> bool:
        return ANY in self.hosts or host_name(host) in self.hosts

    def _same(self, origin: str, host: str) -> bool:
        """Whether an Origin header names this server, or an allowed origin."""
        origin = origin.lower().rstrip("/")
        return origin in self.origins or origin in (f"http://{host.lower()}", f"https://{host.lower()}")

    def _who(self, given: list[str]) -> tuple[str, bool]:
        """Return a name of the API key, which cannot be turned back into it, and whether it is an administrator's; raise
        without a right one where the server has keys."""
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        # compared with all of them: the time says nothing
        known, admin = (sum(hmac.compare_digest(digest, one) for one in of) > 0 for of in (self.digests, self.admins))
        if not self.digests:
            return "", admin
        if not known and not admin:
            message = "no valid API key; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return hashlib.sha256(b"tenant" + digest).hexdigest()[:32], admin


def host_name(host: str) -> str | None:
    """Return the name in a Host header, without its port; None where it is not one."""
    try:
        return urlsplit(f"//{host}").hostname if not set(host) & set("/?#@\\ ") else None
    except ValueError:
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
