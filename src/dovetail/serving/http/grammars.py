"""Grammars of requests are compiled in a process of their own first: one that takes too long, too much memory, or that crashes
ends a fork of that process, and its request gets 400. The engine compiles those that passed again, within the time that is
known by then.

Every grammar is tried with GRAMMAR_QUICK_SECONDS of CPU time, several at once. One that takes longer is tried again with
GRAMMAR_SECONDS, one at a time, so that others never wait for it. API keys take turns. Grammars that passed or were refused are
remembered, and equal ones that arrive together are compiled once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, TypeVar

from dovetail.core.errors import UsageError
from dovetail.core.limits import (
    GRAMMAR_QUICK_SECONDS,
    GRAMMAR_SECONDS,
    GRAMMARS_AT_ONCE,
    GRAMMARS_KEPT,
    GRAMMARS_REFUSED,
    GRAMMARS_WAITING,
)
from dovetail.serving.http.errors import ApiError
from dovetail.serving.http.fair import FairSlots
from dovetail.serving.http.grammar_process import GrammarProcess
from dovetail.serving.http.prompts import PromptEncoder
from dovetail.text.grammar import Grammar, check_extra

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
