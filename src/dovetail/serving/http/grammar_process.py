"""The process that compiles grammars (text/grammar_check.py), seen from the event loop: it is started by the first grammar, and
again after it has ended."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from dovetail.core.limits import GRAMMAR_LIMITS, GRAMMAR_MEMORY, GRAMMAR_STARTED, GRAMMAR_WAIT
from dovetail.serving.http.errors import LOG, ApiError
from dovetail.serving.http.prompts import PromptEncoder
from dovetail.text import grammar
from dovetail.text.grammar import Grammar, GrammarVocabulary

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
