"""The loop of the engine's process: it steps the engine while requests run, and sleeps while none does.

It ends when the other side of its socket closes, so that no engine outlives its server.
"""

from __future__ import annotations

import dataclasses as dc
import socket
from collections.abc import Callable
from typing import Any

from dovetail.adapters.storage import Stored
from dovetail.core.errors import DovetailError
from dovetail.serving.client import Stats
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.wire import Inbox, encode, received


class Loop:
    """Messages in, steps, messages out."""

    def __init__(self, engine: Engine, sock: socket.socket, read_adapter: Callable[[str], Stored]) -> None:
        """read_adapter(directory) reads an adapter for the engine's model."""
        self.engine, self.sock, self.inbox, self.read_adapter = engine, sock, Inbox(), read_adapter
        self.reported: Stats | None = None

    def run(self) -> None:
        """Serve until the other side closes."""
        while True:
            messages = received(self.sock, self.inbox, wait=not self.engine.busy)
            if messages is None:
                return
            outputs: list[Output] = []
            for message in messages:
                if message.get("close"):
                    return
                outputs += self._take(message)
            outputs += self.engine.step()
            self._send(outputs)

    def _take(self, message: dict[str, Any]) -> list[Output]:
        if "abort" in message:
            return self.engine.abort(message["abort"])
        if "call" in message:
            self._write({"answer": message["call"], "error": self._call(message)})
            return []
        try:
            request = Request.from_dict(message["add"])
            self.engine.add(request)
        except DovetailError as error:
            self._write({"refused": message["add"]["id"], "message": str(error)})
        return []

    def _call(self, message: dict[str, Any]) -> str:
        """Load or unload an adapter; returns what is wrong, if something is."""
        try:
            if "load" in message:
                stored = self.read_adapter(message["directory"])
                self.engine.load_adapter(message["load"], stored.kind, stored.tensors)
            else:
                self.engine.unload_adapter(message["unload"])
        except (DovetailError, OSError) as error:
            return str(error) or type(error).__name__
        return ""

    def _send(self, outputs: list[Output]) -> None:
        stats = self.engine.stats()
        if outputs or stats != self.reported:
            self.reported = stats
            self._write({"outputs": [output.to_dict() for output in outputs], "stats": dc.asdict(stats)})

    def _write(self, message: dict[str, Any]) -> None:
        self.sock.setblocking(True)
        self.sock.sendall(encode(message))
