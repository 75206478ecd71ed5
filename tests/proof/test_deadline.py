"""One deadline for an answer of a server, however it is sent; an address that is none is an error of ours."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dovetail.base.errors import FileError
from dovetail.proof.http import Http


def dripping(start: bytes) -> int:
    """A server that sends one byte every 50 ms behind `start`, without end; return its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(65536)
            try:
                connection.sendall(start)
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n", b"HTTP/1.1 200 OK\r\nA:"]
)
def test_an_answer_that_drips_ends_at_the_deadline(start: bytes) -> None:
    begin = time.monotonic()
    with pytest.raises(FileError, match=r"gave no whole answer within 0\.5 seconds"):
        Http(f"http://127.0.0.1:{dripping(start)}", seconds=0.5).post("/completions", {})
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("url", ["http://a b", "http://a\tb\x7f", "http://[", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(FileError):
        Http(url, seconds=0.5).post("/completions", {})
