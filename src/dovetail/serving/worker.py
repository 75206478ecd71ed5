"""The client of an engine in a process of its own: an event loop never waits for the model, and a crash is seen at once.

client = await start_process("dovetail.api.engine", {"directory": "Qwen3-0.6B", "rows": 8}, running=8)
async for output in client.submit(request): …
await client.close()
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from dovetail.base.errors import InputError
from dovetail.base.limits import INPUTS_WAITING, QUEUED
from dovetail.serving.client import LOG, Busy, Client, EngineDead, Stats
from dovetail.serving.request import Inbox, Output, Request, encode

CLOSING = 5.0  # seconds for a process to end by itself


class ProcessClient(Client):
    """An engine in a child process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, running: int, queued: int) -> None:
        self.process, self.sock = process, sock
        self.limit = running + queued
        self.longest = self.vocab = self.inputs = 0  # inputs: texts that are embedded or scored
        self.ranks = False
        self.newest, self.dead = Stats(), ""
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.queues: dict[str, asyncio.Queue[Output | Exception]] = {}
        self.open: dict[str, int] = {}  # continuations of a request that have not ended
        self.calls: dict[int, asyncio.Future[dict[str, Any]]] = {}  # that wait for their answer
        self.numbers = count()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    # -- requests

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        """Yield the outputs of a request; where the caller stops early, the request is aborted."""
        if self.dead:
            raise EngineDead(self.dead)
        if sum(self.open.values()) + request.n > self.limit:
            raise Busy(max(1.0, self.newest.waiting / 8))  # an estimate: a second per eight in the queue
        if request.id in self.queues:
            raise InputError(f"id: {request.id!r} is running already")
        queue = self.queues[request.id] = asyncio.Queue()
        self.open[request.id] = request.n
        self._send({"add": request.to_dict()})
        try:
            while self.open[request.id]:
                got = await queue.get()
                if isinstance(got, Exception):
                    self.open[request.id] = 0
                    raise got
                if got.finish is not None:
                    self.open[request.id] -= 1
                yield got
        finally:
            if self.open.pop(request.id) and not self.dead:
                self._send({"abort": request.id})
            del self.queues[request.id]

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        await self._call({"load": name, "directory": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self._call({"unload": name})

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str | None) -> list[list[float]]:
        return await self._compute({"embed": [list(one) for one in texts], "adapter": adapter}, len(texts))

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], adapter: str | None) -> list[float]:
        return await self._compute({"score": [[list(one) for one in pair] for pair in pairs], "adapter": adapter}, len(pairs))

    async def _compute(self, message: dict[str, Any], count: int) -> list[Any]:
        if self.inputs + count > INPUTS_WAITING:
            raise Busy(max(1.0, self.inputs / 64))
        self.inputs += count
        try:
            return await self._call(message)
        finally:
            self.inputs -= count

    async def _call(self, message: dict[str, Any]) -> Any:
        if self.dead:
            raise EngineDead(self.dead)
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.calls[number] = answer
        self._send({"call": number, **message})
        try:
            found = await answer
            if found["error"]:
                raise InputError(found["error"])
            return found.get("value")
        except asyncio.CancelledError:
            if not self.dead:
                self._send({"cancel": number})
            raise
        finally:
            del self.calls[number]

    def abort(self, id: str) -> None:
        if id in self.queues and not self.dead:
            self._send({"abort": id})

    def alive(self) -> bool:
        """Whether the process runs and has loaded its model."""
        return not self.dead and self.ready.done()

    async def ended(self) -> str:
        return await asyncio.shield(self.over)

    def stats(self) -> Stats:
        return self.newest

    async def close(self) -> None:
        """End the process, and the tasks that talk to it."""
        if not self.dead:
            self._send({"close": True})
            self.dead = "the engine was closed"
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), CLOSING)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.sock.close()

    # -- messages

    def _send(self, message: dict[str, Any]) -> None:
        self.outgoing.put_nowait(encode(message))

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the reader sees the end of the process, too
            while True:
                await loop.sock_sendall(self.sock, await self.outgoing.get())

    async def _read(self) -> None:
        loop, inbox, reason = asyncio.get_running_loop(), Inbox(), "the engine's process has ended"
        try:
            while data := await loop.sock_recv(self.sock, 1 << 20):
                for message in inbox.push(data):
                    self._take(message)
        except (OSError, ValueError) as error:
            reason = f"{reason}: {error}"
        if not self.dead:
            with suppress(TimeoutError):
                code = await asyncio.wait_for(self.process.wait(), CLOSING)
                reason += f", by {signal.Signals(-code).name}" if code < 0 else f", with exit code {code}"
        self._die(self.dead or reason)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.longest, self.vocab, self.ranks = (message["ready"][name] for name in ("longest", "vocab", "ranks"))
            self.ready.set_result(None)
        elif "fatal" in message:
            self._die(message["fatal"])
        elif "answer" in message:
            if (call := self.calls.get(message["answer"])) is not None and not call.done():
                call.set_result(message)
        elif "refused" in message:
            if (queue := self.queues.get(message["refused"])) is not None:
                queue.put_nowait(InputError(message["message"]))
        else:
            self.newest = Stats(**message["stats"])
            for data in message["outputs"]:
                output = Output.from_dict(data)
                if (queue := self.queues.get(output.id)) is not None:
                    queue.put_nowait(output)

    def _die(self, reason: str) -> None:
        if not self.dead and self.ready.done():
            LOG.error("%s; requests in flight: %d", reason, len(self.queues))
            self.over.set_result(reason)
        self.dead = self.dead or reason
        if not self.ready.done():
            self.ready.set_exception(EngineDead(reason))
        for queue in self.queues.values():
            queue.put_nowait(EngineDead(reason))
        for call in self.calls.values():
            if not call.done():
                call.set_exception(EngineDead(reason))


async def start_process(module: str, options: Mapping[str, Any], *, running: int, queued: int = QUEUED) -> ProcessClient:
    """Start `python -P -m MODULE FD OPTIONS`, the options as JSON, and return when it reports that it is ready. It talks over
    the socket FD. `running` requests run at once, and `queued` more may wait. Raises EngineDead with its reason if it ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    command = (sys.executable, "-P", "-m", module, str(theirs.fileno()), json.dumps(options))
    process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL)
    theirs.close()
    client = ProcessClient(process, ours, running, queued)
    try:
        await client.ready
    except BaseException:
        await client.close()
        raise
    return client
