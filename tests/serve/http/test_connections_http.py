"""Connections without a request that is being answered: they have a deadline, a size and a number."""

from __future__ import annotations

import json
import socket
import time

import httpx2
import pytest
from http_server import Served

from dovetail.base.limits import REQUEST_HEADER_BYTES
from dovetail.serving.http import connections
from dovetail.serving.http.options import Options

PARTIAL = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def ended(sock: socket.socket, seconds: float) -> bytes:
    """What the server sends before it closes."""
    sock.settimeout(seconds)
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


@pytest.fixture
def hasty(start, monkeypatch) -> Served:
    monkeypatch.setattr(connections, "REQUEST_HEADER_SECONDS", 0.6)
    return start()


@pytest.mark.parametrize("first", [b"", b"G", PARTIAL, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n\r\n"])
def test_b5_a_connection_without_complete_headers_is_closed(hasty: Served, first: bytes) -> None:
    """Nothing, a part of the headers, and a byte now and then after an answer."""
    with socket.create_connection(("127.0.0.1", hasty.port)) as sock:
        begin = time.monotonic()
        sock.sendall(first)
        data = b""
        sock.settimeout(0.2)
        while time.monotonic() - begin < 8:
            try:
                chunk = sock.recv(65536)
                data += chunk
                if not chunk:
                    break
                continue
            except TimeoutError:
                pass
            except ConnectionResetError:
                break
            try:
                sock.sendall(b"x")
            except (BrokenPipeError, ConnectionResetError):
                break
        assert time.monotonic() - begin < 4
        if first == PARTIAL:
            assert data.startswith(b"HTTP/1.1 408 ")
            assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert hasty.http.get("/health").status_code == 200


def test_b5_the_deadline_ends_no_request_that_runs(start, monkeypatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_HEADER_SECONDS", 0.3)
    slow = start(pace=0.1)
    with httpx2.Client(base_url=slow.url, timeout=60) as client:
        for _ in range(2):  # on one connection
            answer = client.post("/v1/completions", json={"prompt": "the cat", "max_tokens": 12, "ignore_eos": True})
            assert answer.status_code == 200


def flooded(port: int, pieces: list[bytes]) -> bytes:
    """The answer to a flood."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        for piece in pieces:
            sock.sendall(piece)
        return ended(sock, 10)


def test_b5_header_floods_are_431(served: Served) -> None:
    for piece in (b"X-Long: " + b"x" * 4000 + b"\r\n", b"a: b\r\n"):
        pieces = [b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", *[piece] * (REQUEST_HEADER_BYTES // len(piece) + 1)]
        assert flooded(served.port, pieces).startswith(b"HTTP/1.1 431 ")
    flood = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 50) for i in range(REQUEST_HEADER_BYTES // 50))
    for path in (b"/v1/models", b"/health"):  # complete in one packet
        request = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + flood + b"\r\n"
        assert flooded(served.port, [request]).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("piece", "pause"), [(b"x" * 65536, 0.0), (b"x", 0.05)])
def test_b5_a_flood_that_goes_on_after_its_answer_is_cut(served: Served, piece: bytes, pause: float) -> None:
    """The answer arrives although the flood is not read to its end; reading ends after some bytes, or after two seconds."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * REQUEST_HEADER_BYTES
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
        sock.sendall(head)
        assert ended(sock, 10).startswith(b"HTTP/1.1 431 ")
        begin = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            flood(sock, piece, pause, seconds=30)
        assert time.monotonic() - begin < connections.LINGER_SECONDS + 4
    assert served.http.get("/health").status_code == 200


def flood(sock: socket.socket, piece: bytes, pause: float, seconds: float) -> None:
    """Send pieces until the connection is closed or the time is up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sock.sendall(piece)
        time.sleep(pause)


def test_b5_an_address_has_a_number_of_connections(start) -> None:
    few = start(options=Options(models={"tiny": None}, address_connections=4))
    sockets = [socket.create_connection(("127.0.0.1", few.port)) for _ in range(4)]
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", few.port)) as more:
        data = ended(more, 10)
        assert data.startswith(b"HTTP/1.1 429 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    for sock in sockets:
        sock.close()
    time.sleep(0.2)
    assert few.http.get("/health").status_code == 200  # the count goes down again


def test_b5_an_ipv6_client_is_its_network() -> None:
    same = {connections._network(host) for host in ("2001:db8::1", "2001:db8::ffff:2", "2001:db8::1%eth0")}
    assert len(same) == 1
    assert connections._network("2001:db8:0:1::1") not in same
    assert connections._network("::ffff:10.0.0.1") == connections._network("10.0.0.1") == "10.0.0.1"
