"""Servers that answer oddly, each on a port of its own: raw bytes after the request was read."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def logprobs(*entries: tuple[int, object]) -> bytes:
    """A completion in llama.cpp's form; json writes NaN as NaN."""
    top = [{"id": i, "token": f"token_id:{i}", "logprob": number} for i, number in entries]
    return reply(json.dumps({"choices": [{"logprobs": {"content": [{**top[0], "top_logprobs": top}]}}]}).encode())


def drip(connection: socket.socket) -> None:
    """One byte of the header every tenth of a second, without end."""
    for _ in range(600):
        connection.send(b"H")
        time.sleep(0.1)


@contextmanager
def serving(answer: bytes | Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that gives one answer to every connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(1 << 16)
                    if isinstance(answer, bytes):
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):  # bytes left unread would reset the connection
                            pass
                    else:
                        answer(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
