"""An engine that is started again when its process ends, up to a number of times; then `ended` returns the reason.

Requests in flight get an error that says so, and so do those that arrive while the engine starts. Adapters that were loaded by
requests are loaded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dovetail.base.errors import InputError
from dovetail.serving.client import LOG, Client, EngineDead, EngineRestarting, Stats
from dovetail.serving.request import Output, Request


class RestartingClient(Client):
    """The `Client` of an engine that may be replaced."""

    def __init__(self, client: Client, start: Callable[[], Awaitable[Client]], restarts: int) -> None:
        """`start` starts an engine like the one of `client`; it is called up to `restarts` times."""
        self.client, self.start, self.left = client, start, restarts
        self.longest, self.vocab, self.ranks = client.longest, client.vocab, client.ranks
        self.loaded: dict[str, str | Path] = {}  # adapters, since the start
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            reason = await self.client.ended()
            while self.left:
                self.left -= 1
                LOG.error("the engine is started again; restarts left: %d", self.left)
                await self.client.close()
                try:
                    self.client = await self.start()
                except EngineDead as error:
                    reason = str(error)
                    LOG.error("the engine could not be started again: %s", reason)
                    continue
                for name, directory in self.loaded.items():
                    with suppress(EngineDead, InputError):  # the next turn of the loop sees that it has ended
                        await self.client.load_adapter(name, directory)
                LOG.warning("the engine runs again")
                break
            else:
                self.over.set_result(reason)
                return

    def _error(self) -> EngineDead:
        return EngineDead("the engine has ended") if self.over.done() else EngineRestarting()

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        """Yield the outputs of a request; EngineRestarting where the engine ends meanwhile and is started again."""
        if not self.client.alive():
            raise self._error()
        try:
            async for output in self.client.submit(request):
                yield output
        except EngineDead:
            raise (EngineRestarting() if self.left else EngineDead("the engine has ended")) from None

    def abort(self, id: str) -> None:
        self.client.abort(id)

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        await self.client.load_adapter(name, directory)
        self.loaded[name] = directory

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)
        await self.client.unload_adapter(name)

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str | None) -> list[list[float]]:
        return await self.client.embed(texts, adapter)

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], adapter: str | None) -> list[float]:
        return await self.client.score(pairs, adapter)

    def alive(self) -> bool:
        return self.client.alive()

    async def ended(self) -> str:
        """Wait until the engine has ended and is not started again; return the reason."""
        return await asyncio.shield(self.over)

    def stats(self) -> Stats:
        return self.client.stats()

    async def close(self) -> None:
        self.watcher.cancel()
        with suppress(asyncio.CancelledError):
            await self.watcher
        await self.client.close()
