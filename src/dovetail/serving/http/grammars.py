"""Grammars of requests are compiled in a process of their own first: one that takes too long, too much memory, or that crashes
ends a fork of that process, and its request gets 400. The engine compiles those that passed again, within the time that is
known by then.

Every grammar is tried with GRAMMAR_QUICK_SECONDS of CPU time, several at once. One that takes longer is tried again with
GRAMMAR_SECONDS, one at a time, so that others never wait for it. API keys take turns. Grammars that passed or were refused are
remembered, and equal ones that arrive together are compiled once.

Work that clients share: a few pieces at once, one slot of them free for a tenant that has none, and those who wait in turns.

slots = FairSlots(3, waiting=16)
async with slots.turn(tenant, seconds=0.25): …        Busy where the tenant has 16 that wait

One tenant with many pieces of work delays another by one piece at most, not by all of them.

The process that compiles grammars (text/grammar_check.py), seen from the event loop: it is started by the first grammar, and
again after it has ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from dovetail.base.errors import UsageError
from dovetail.base.limits import (
    GRAMMAR_LIMITS,
    GRAMMAR_MEMORY,
    GRAMMAR_QUICK_SECONDS,
    GRAMMAR_SECONDS,
    GRAMMAR_STARTED,
    GRAMMAR_WAIT,
    GRAMMARS_AT_ONCE,
    GRAMMARS_KEPT,
    GRAMMARS_REFUSED,
    GRAMMARS_WAITING,
)
from dovetail.serving.client import Busy
from dovetail.serving.http.errors import LOG, ApiError
from dovetail.serving.http.prompts import PromptEncoder
from dovetail.text import grammar
from dovetail.text.grammar import Grammar, GrammarVocabulary, check_extra

K = TypeVar("K")
V = TypeVar("V")


class GrammarChecker:
    """source(grammar, tenant) -> llguidance's form of it, which the engine takes."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.process = GrammarProcess(encoder)
        self.lanes = [
            (GRAMMAR_QUICK_SECONDS, FairSlots(GRAMMARS_AT_ONCE, GRAMMARS_WAITING)),
            (GRAMMAR_SECONDS, FairSlots(1, GRAMMARS_WAITING)),
        ]
        self.passed: OrderedDict[Grammar, str] = OrderedDict()
        self.refused: OrderedDict[int, str] = OrderedDict()  # by hash: their texts may be long
        self.running: dict[Grammar, asyncio.Task[str]] = {}

    async def source(self, grammar: Grammar, tenant: str) -> str:
        """Return llguidance's form of a grammar that compiles; ApiError 400 with the reason where it does not."""
        try:
            check_extra()
        except UsageError as error:
            raise ApiError(400, str(error), param=grammar.format, code="grammar_not_offered") from None
        if grammar in self.passed:
            self.passed.move_to_end(grammar)
            return self.passed[grammar]
        if hash(grammar) in self.refused:
            raise _refusal(grammar, self.refused[hash(grammar)])
        if (task := self.running.get(grammar)) is None:
            task = self.running[grammar] = asyncio.create_task(self._compiled(grammar, tenant))
            task.add_done_callback(lambda done: (self.running.pop(grammar, None), done.cancelled() or done.exception()))
        return await asyncio.shield(task)  # a client that goes away ends neither the others nor what is remembered

    async def _compiled(self, grammar: Grammar, tenant: str) -> str:
        problem = f"it takes more than {GRAMMAR_SECONDS:g} s to compile; simplify it"
        for seconds, slots in self.lanes:
            async with slots.turn(tenant, seconds):
                try:
                    answer = await self.process.compiled(grammar, seconds)
                except EOFError:
                    answer = dict[str, Any](late=True)
            if "source" in answer:
                _remember(self.passed, grammar, answer["source"], GRAMMARS_KEPT)
                return answer["source"]
            if "late" in answer:  # not the grammar's fault: nothing is remembered
                raise ApiError(503, f"{grammar.format}: could not be compiled now; try again", code="aborted")
            if "error" in answer:
                problem = answer["error"]
                break
        _remember(self.refused, hash(grammar), problem, GRAMMARS_REFUSED)
        raise _refusal(grammar, problem)

    async def close(self) -> None:
        """End the process, and what it was to compile."""
        for task in self.running.values():
            task.cancel()
        await self.process.close()


def _remember(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)


def _refusal(grammar: Grammar, problem: str) -> ApiError:
    return ApiError(400, f"{grammar.format}: {problem}", param=grammar.format, code="grammar_refused")


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


CHILD = Path(grammar.__file__).with_name("grammar_check.py")
LINE = 1 << 24  # bytes of an answer
SLACK = 10.0  # seconds behind GRAMMAR_WAIT


class GrammarProcess:
    """compiled(grammar, seconds) -> what the process answers."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.process: asyncio.subprocess.Process | None = None
        self.reader: asyncio.Task[None] | None = None
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.numbers, self.lock = count(), asyncio.Lock()

    async def compiled(self, grammar: Grammar, seconds: float) -> dict[str, Any]:
        """Return `source`, `error`, `slow` or `late`; EOFError where the process has ended."""
        async with self.lock:
            if self.process is None or self.process.returncode is not None:
                await self._start()
        assert self.process is not None
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        try:
            async with asyncio.timeout(GRAMMAR_WAIT + SLACK):
                await self._send({"id": number, "format": grammar.format, "text": grammar.text, "seconds": seconds})
                return await answer
        except (OSError, TimeoutError):
            raise EOFError from None
        finally:
            del self.answers[number]

    async def _start(self) -> None:
        await self.close()
        vocabulary = self.encoder.vocabulary
        tokenizer, stop = vocabulary.tokenizer, vocabulary.stop
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer, so its output cannot be constrained")
        given = await self.encoder.run(lambda: GrammarVocabulary.of(tokenizer, stop))
        command, pipe = (sys.executable, "-I", str(CHILD), str(GRAMMAR_MEMORY), str(GRAMMAR_WAIT)), asyncio.subprocess.PIPE
        process = self.process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=LINE, env={}
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(GRAMMAR_STARTED):
                await self._send({"tokenizer": given.tokenizer, "stop": given.stop, "limits": GRAMMAR_LIMITS})
                if not await process.stdout.readline():
                    raise EOFError
        except (EOFError, OSError, TimeoutError) as error:
            LOG.error("the process that compiles grammars cannot start: %s", type(error).__name__)
            await self.close()
            raise ApiError(400, "constrained output is not offered for this model: its tokenizer cannot be read") from None
        self.reader = asyncio.create_task(self._read(process.stdout))

    async def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError):
            while line := await stdout.readline():
                data = json.loads(line)
                if (answer := self.answers.get(data["id"])) is not None and not answer.done():
                    answer.set_result(data)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(EOFError())

    async def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self.reader is not None:
            await self.reader
            self.reader = None
