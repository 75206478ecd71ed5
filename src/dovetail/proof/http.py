"""Ask a server that is not trusted, in JSON: one connection, one deadline, a bounded answer, no redirect.

http.client sets a timeout per read, so a server that sends one byte per second could hold a client for hours. A timer closes
the socket at the deadline, whatever the connection waits for.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dovetail.base.errors import FileError, UsageError, printable
from dovetail.base.limits import ANSWER_BYTES, ANSWER_SECONDS

CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class BadStatus(FileError):
    """The server answers with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class Refused(BadStatus):
    """The server does not accept the request (400 or 422)."""


@dc.dataclass
class Http:
    """The client of one server: its URL, the seconds that a whole answer may take, and a key that is sent as a bearer token."""

    url: str
    key: str | None = None
    seconds: float = ANSWER_SECONDS

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers to `POST {url}{path}`."""
        return self._json(path, body)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that the server answers to `GET {url}{path}`."""
        return self._json(path, None)

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to `[DONE]`. Closing the iterator closes the connection."""
        with self.exchange(path, body) as (where, response):
            if response.status != 200:
                _check_status(where, response, response.read(ANSWER_BYTES + 1))
            total = 0
            while line := response.readline(ANSWER_BYTES + 1):
                total += len(line)
                if total > ANSWER_BYTES:
                    raise FileError(f"{where}: the answer is longer than {ANSWER_BYTES:,} bytes")
                event = line.strip()
                if event == b"data: [DONE]":
                    return
                if event.startswith(b"data:"):
                    yield _parsed(where, event.removeprefix(b"data:"))

    def _json(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        with self.exchange(path, body) as (where, response):
            text = response.read(ANSWER_BYTES + 1)
        _check_status(where, response, text)
        if len(text) > ANSWER_BYTES:
            raise FileError(f"{where}: the answer is longer than {ANSWER_BYTES:,} bytes")
        return _parsed(where, text)

    @contextlib.contextmanager
    def exchange(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[tuple[str, http.client.HTTPResponse]]:
        """Yield the printable address and the response to one request, GET without a body; the deadline covers the whole
        block."""
        connection, where, target = self._connection(self.url.rstrip("/") + path)
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            if not (self.key.isascii() and self.key.isprintable()):  # http.client would quote the key in its error
                raise UsageError("--key: holds characters that no HTTP header has; give it without line ends")
            headers["Authorization"] = f"Bearer {self.key}"
        late, sockets = threading.Event(), list[socket.socket]()
        timer = threading.Timer(self.seconds, _close, (sockets, late))
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            sockets.append(connection.sock)  # the connection forgets it as soon as an answer that ends with the socket begins
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", target, data, headers)
            yield where, connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late.is_set():
                raise FileError(f"{where}: gave no whole answer within {self.seconds:g} seconds") from error
            raise FileError(f"{where}: the request failed ({printable(f'{type(error).__name__}: {error}')})") from error
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise FileError(f"{where}: gave no whole answer within {self.seconds:g} seconds")

    def _connection(self, address: str) -> tuple[http.client.HTTPConnection, str, str]:
        """(a connection that is not open yet, the printable address, the target of a request)."""
        try:
            parts = urlsplit(address)
            if parts.scheme not in CONNECTIONS or not parts.hostname:
                raise FileError(f"{printable(self.url)}: only http:// and https:// addresses of a host are supported")
            connection = CONNECTIONS[parts.scheme](parts.hostname, parts.port, timeout=self.seconds)
        except (http.client.HTTPException, ValueError) as error:
            raise FileError(f"{printable(self.url)}: is not a URL ({printable(str(error))})") from error
        return connection, printable(address), parts.path + (f"?{parts.query}" if parts.query else "")


def _close(sockets: list[socket.socket], late: threading.Event) -> None:
    """End a connection from outside: a blocked read returns at once."""
    late.set()
    for one in sockets:
        with contextlib.suppress(OSError):  # it has ended already
            one.shutdown(socket.SHUT_RDWR)


def _check_status(where: str, response: http.client.HTTPResponse, text: bytes) -> None:
    status = response.status
    if 300 <= status < 400:
        location = printable(response.getheader("Location", ""))
        raise FileError(f"{where}: redirects to {location}, which is not followed; give that address instead")
    if status != 200:
        refusal = Refused if status in (400, 422) else BadStatus
        raise refusal(f"{where}: answered {status}: {printable(text[:400].decode(errors='replace'))}", status)


def _parsed(where: str, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: the answer is not JSON ({printable(str(error))})") from error
    if not isinstance(answer, dict):
        raise FileError(f"{where}: the answer is not a JSON object")
    return answer
