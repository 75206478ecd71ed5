"""The loop of the engine's process: it steps the engine while requests run, and sleeps while none does.

It ends when the other side of its socket closes, so that no engine outlives its server. The grammar of a request is compiled in
a thread, so that no other request waits for it.
"""

from __future__ import annotations

import dataclasses as dc
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from dovetail.base.errors import DovetailError
from dovetail.base.limits import GRAMMARS_AT_ONCE
from dovetail.decoding.embedding import Embedder
from dovetail.serving.client import Stats
from dovetail.serving.embedding_engine import Calls, PooledEngine
from dovetail.serving.engine import Engine
from dovetail.serving.request import Inbox, Output, Request, encode, received
from dovetail.weights.adapters.storage import Stored

COMPILERS = GRAMMARS_AT_ONCE + 1  # threads: as many as the checks let pass at once
POLL = 0.01  # seconds between two looks at the socket while a grammar is compiled


class Loop:
    """Messages in, steps, messages out."""

    def __init__(
        self,
        engine: Engine | PooledEngine,
        sock: socket.socket,
        read_adapter: Callable[[str], Stored],
        embedder: Embedder,
    ) -> None:
        """read_adapter(directory) reads an adapter for the engine's model, which `embedder` has, too."""
        self.engine, self.sock, self.inbox, self.read_adapter = engine, sock, Inbox(), read_adapter
        self.reported: Stats | None = None
        self.compiling: dict[str, tuple[Request, Future[object]]] = {}  # requests whose grammar is not ready yet
        self.compiler = ThreadPoolExecutor(COMPILERS, "grammar")
        self.calls = Calls(embedder, engine.adapters)

    def run(self) -> None:
        """Serve until the other side closes."""
        while True:
            idle = not (self.engine.busy or self.compiling or self.calls.waiting)
            messages = received(self.sock, self.inbox, wait=idle)
            if messages is None:
                return
            outputs: list[Output] = []
            for message in messages:
                if message.get("close"):
                    return
                outputs += self._take(message)
            self._compiled()
            if (answer := self.calls.step()) is not None:
                self._write(answer)
            outputs += self.engine.step()
            self._send(outputs)

    def _take(self, message: dict[str, Any]) -> list[Output]:
        if "abort" in message:
            self.compiling.pop(message["abort"], None)
            return self.engine.abort(message["abort"])
        if "cancel" in message:
            self.calls.cancel(message["cancel"])
            return []
        if "embed" in message or "score" in message:
            self.calls.add(message)
            return []
        if "call" in message:
            self._write({"answer": message["call"], "error": self._call(message)})
            return []
        self._add(message["add"])
        return []

    def _add(self, data: dict[str, Any]) -> None:
        try:
            request = Request.from_dict(data)
            if request.grammar and self.engine.grammars is not None:
                self.compiling[request.id] = request, self.compiler.submit(self.engine.grammars.matcher, request.grammar)
            else:
                self.engine.add(request)
        except DovetailError as error:
            self._write({"refused": data["id"], "message": str(error)})

    def _compiled(self) -> None:
        """Add the requests whose grammar is ready; wait a moment for one where nothing else is to do."""
        if self.compiling and not self.engine.busy and not self.calls.waiting:
            wait([ready for _, ready in self.compiling.values()], POLL, "FIRST_COMPLETED")
        for request, ready in list(self.compiling.values()):
            if not ready.done():
                continue
            del self.compiling[request.id]
            try:
                ready.result()
                self.engine.add(request)
            except DovetailError as error:
                self._write({"refused": request.id, "message": str(error)})

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
