"""POST JSON to a server that is not trusted: one connection, one deadline, a bounded answer, no redirect.

http.client sets a timeout per read, so a server that sends one byte per second could hold a client for hours. A timer closes
the socket at the deadline, whatever the connection waits for.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dovetail.core.errors import FileError
from dovetail.core.limits import ANSWER_BYTES, ANSWER_SECONDS
from dovetail.core.printable import printable

CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class Refused(FileError):
    """The server does not accept the request (400 or 422)."""


def post_json(url: str, path: str, body: Mapping[str, Any], *, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The JSON object that a server answers to `POST {url}{path}`."""
    address = url.rstrip("/") + path
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise FileError(f"{printable(url)}: is not a URL ({printable(str(error))})") from error
    if parts.scheme not in CONNECTIONS or not host:
        raise FileError(f"{printable(url)}: only http:// and https:// addresses of a host are asked")
    where = printable(address)
    try:
        connection = CONNECTIONS[parts.scheme](host, port, timeout=seconds)
    except (http.client.HTTPException, ValueError) as error:
        raise FileError(f"{where}: is not a URL ({printable(str(error))})") from error
    late, sockets = threading.Event(), list[socket.socket]()
    timer = threading.Timer(seconds, _close, (sockets, late))
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        sockets.append(connection.sock)  # the connection forgets it as soon as an answer that ends with the socket begins
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set():
            raise FileError(f"{where}: gave no whole answer within {seconds:g} seconds") from error
        raise FileError(f"{where}: could not be asked ({printable(f'{type(error).__name__}: {error}')})") from error
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():
        raise FileError(f"{where}: gave no whole answer within {seconds:g} seconds")
    return _parsed(where, response.status, response.getheader("Location", ""), text)


def _close(sockets: list[socket.socket], late: threading.Event) -> None:
    """End a connection from outside: a blocked read returns at once."""
    late.set()
    for one in sockets:
        with contextlib.suppress(OSError):  # it has ended already
            one.shutdown(socket.SHUT_RDWR)


def _parsed(where: str, status: int, location: str, text: bytes) -> dict[str, Any]:
    if 300 <= status < 400:
        raise FileError(f"{where}: redirects to {printable(location)}, which is not followed; give that address instead")
    if status != 200:
        refusal = Refused if status in (400, 422) else FileError
        raise refusal(f"{where}: answered {status}: {printable(text[:400].decode(errors='replace'))}")
    if len(text) > ANSWER_BYTES:
        raise FileError(f"{where}: the answer is longer than {ANSWER_BYTES:,} bytes")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: the answer is not JSON ({printable(str(error))})") from error
    if not isinstance(answer, dict):
        raise FileError(f"{where}: the answer is not a JSON object")
    return answer
