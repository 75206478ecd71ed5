"""Grammars of requests are compiled in a process of their own first: one that takes too long, too much memory, or that crashes
ends that process alone, and its request gets 400.

One process compiles one grammar at a time; it is started by the first request that has one, and again after it was killed.
Grammars that passed are remembered. The engine compiles them again, within the time that is known by then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.core.errors import UsageError
from dovetail.core.limits import (
    GRAMMAR_LIMITS,
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    GRAMMAR_STARTED,
    GRAMMAR_WAIT,
    GRAMMARS_KEPT,
    GRAMMARS_WAITING,
)
from dovetail.serving.client import Busy
from dovetail.serving.http.errors import LOG, ApiError
from dovetail.serving.http.prompts import PromptEncoder
from dovetail.text import grammar
from dovetail.text.grammar import Grammar, GrammarVocabulary, check_extra

CHILD = Path(grammar.__file__).with_name("grammar_check.py")
LINE = 1 << 24  # bytes of an answer


class GrammarChecker:
    """source(grammar) -> llguidance's form of it, which the engine takes."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.process: asyncio.subprocess.Process | None = None
        self.passed: OrderedDict[Grammar, str] = OrderedDict()
        self.waiting = 0
        self.lock = asyncio.Lock()

    async def source(self, grammar: Grammar) -> str:
        """Return llguidance's form of a grammar that compiles; ApiError 400 with the reason where it does not."""
        try:
            check_extra()
        except UsageError as error:
            raise ApiError(400, str(error), param=grammar.format, code="grammar_not_offered") from None
        if grammar in self.passed:
            self.passed.move_to_end(grammar)
            return self.passed[grammar]
        if self.waiting >= GRAMMARS_WAITING:
            raise Busy(self.waiting * GRAMMAR_SECONDS)
        self.waiting += 1
        try:
            async with self.lock:
                answer = await self._ask({"format": grammar.format, "text": grammar.text})
        finally:
            self.waiting -= 1
        if "source" not in answer:
            raise ApiError(400, f"{grammar.format}: {answer['error']}", param=grammar.format, code="grammar_refused")
        self.passed[grammar] = answer["source"]
        while len(self.passed) > GRAMMARS_KEPT:
            self.passed.popitem(last=False)
        return answer["source"]

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self.process is None or self.process.returncode is not None:
                await self._start()
            return await self._exchange(message, GRAMMAR_WAIT)
        except (EOFError, OSError, TimeoutError, ValueError):
            await self.close()
            return {"error": f"it takes more than {GRAMMAR_SECONDS} s or {GRAMMAR_MEMORY >> 20} MB to compile; simplify it"}
        except BaseException:  # the client has gone in mid-exchange: the next answer would be its own
            await self.close()
            raise

    async def _start(self) -> None:
        vocabulary = self.encoder.vocabulary
        tokenizer, stop = vocabulary.tokenizer, vocabulary.stop
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer, so its output cannot be constrained")
        given = await self.encoder.run(lambda: GrammarVocabulary.of(tokenizer, stop))
        command = (sys.executable, "-I", str(CHILD), str(GRAMMAR_SECONDS), str(GRAMMAR_MEMORY))
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=LINE, env={}
        )
        first = {"tokenizer": given.tokenizer, "stop": given.stop, "limits": GRAMMAR_LIMITS}
        try:
            await self._exchange(first, GRAMMAR_STARTED)
        except (EOFError, OSError, TimeoutError) as error:
            LOG.error("the process that compiles grammars cannot start: %s", type(error).__name__)
            await self.close()
            raise ApiError(400, "constrained output is not offered for this model: its tokenizer cannot be read") from None

    async def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.process is not None
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        async with asyncio.timeout(seconds):
            stdin.write(json.dumps(message).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    async def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
