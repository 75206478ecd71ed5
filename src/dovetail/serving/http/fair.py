"""Work that clients share: a few pieces at once, one slot of them free for a tenant that has none, and those who wait in turns.

slots = FairSlots(3, waiting=16)
async with slots.turn(tenant, seconds=0.25): …        Busy where the tenant has 16 that wait

One tenant with many pieces of work delays another by one piece at most, not by all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from dovetail.serving.client import Busy


class FairSlots:
    """`slots` pieces of work at once, of one tenant all but one, and up to `waiting` more per tenant."""

    def __init__(self, slots: int, waiting: int) -> None:
        self.slots, self.share, self.most = slots, max(1, slots - 1), waiting
        self.running: Counter[str] = Counter()
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the first tenant is the next

    @asynccontextmanager
    async def turn(self, tenant: str, seconds: float) -> AsyncGenerator[None, None]:
        """Wait for a slot; `seconds` is what one piece of work may take, for the estimate of Busy."""
        queue = self.waiting.setdefault(tenant, deque())
        if len(queue) >= self.most:
            raise Busy(len(queue) * seconds)
        mine = asyncio.get_running_loop().create_future()
        queue.append(mine)
        self._next()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self.running[tenant] -= 1
                if tenant in self.waiting:  # it has had its turn: others that came meanwhile are before it
                    self.waiting.move_to_end(tenant)
            self._next()

    def _next(self) -> None:
        """Give free slots to those who wait, one per tenant in turn."""
        for tenant in list(self.waiting):
            queue = self.waiting[tenant]
            while queue and queue[0].done():
                queue.popleft()  # its client has gone
            if queue and self.running.total() < self.slots and self.running[tenant] < self.share:
                queue.popleft().set_result(None)
                self.running[tenant] += 1
                self.waiting.move_to_end(tenant)
            if not queue:
                del self.waiting[tenant]
        self.running += Counter()  # without zeros
