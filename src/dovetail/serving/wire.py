"""Messages between the HTTP side and the engine's process: JSON objects, each behind its length in four bytes. No pickle.

to the engine      {"add": {…request…}}   {"abort": id}   {"close": true}   {"cancel": number}
                   {"call": number, "load": name, "directory": …}   {"call": number, "unload": name}
                   {"call": number, "embed": [[ids], …], "adapter": …}
                   {"call": number, "score": [[[ids], [types]], …], "adapter": …}
from the engine    {"ready": {"longest": …, "vocab": …, "ranks": …}}   {"outputs": [{…}], "stats": {…}}
                   {"refused": id, "message": …}   {"answer": number, "error": message, "value": …}   {"fatal": message}
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<I")
MOST = 64 << 20  # bytes of one message: prompts and log-probs of a step are far below


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MOST:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MOST}")
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Collects bytes and returns the messages that are whole."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def push(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes; returns the messages that they complete."""
        self.buffer += data
        messages: list[dict[str, Any]] = []
        while len(self.buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.buffer)
            if length > MOST:
                raise ValueError(f"a message of {length} bytes; the limit is {MOST}")
            end = LENGTH.size + length
            if len(self.buffer) < end:
                break
            messages.append(json.loads(self.buffer[LENGTH.size : end]))
            del self.buffer[:end]
        return messages


def received(sock: socket.socket, inbox: Inbox, wait: bool) -> list[dict[str, Any]] | None:
    """The messages that are there, waiting for one if `wait`; None where the other side has closed."""
    messages: list[dict[str, Any]] = []
    sock.setblocking(wait)
    while True:
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            return messages
        if not data:
            return None
        messages += inbox.push(data)
        if wait and messages:
            sock.setblocking(False)
            wait = False
