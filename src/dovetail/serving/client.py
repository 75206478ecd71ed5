"""What the HTTP side asks of an engine. The native engine runs in a process of its own (worker.py); tests may have others.

async for output in client.submit(request):     one Output per step with new tokens; the last of each index has `finish`
    …
client.abort(request.id)                        its outputs end, and its cache blocks are free
"""

from __future__ import annotations

import dataclasses as dc
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from dovetail.base.errors import DovetailError
from dovetail.serving.request import Output, Request

LOG = logging.getLogger("dovetail.serving")
LogFormat = Literal["text", "json"]


@dc.dataclass(frozen=True, kw_only=True)
class Stats:
    """The state of an engine, as metrics show it. Counts are since the start."""

    running: int = 0  # sequences that hold a row
    waiting: int = 0  # requests in the queue
    blocks: int = 0  # blocks (pages) of the KV cache
    free_blocks: int = 0  # of these, those that no request and no cached prefix uses
    cached_blocks: int = 0  # of these, those that only cached prefixes use
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts that were looked up
    prefix_hits: int = 0  # of these, those found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_seconds: float = 0.0  # in all steps of the model
    schedule_seconds: float = 0.0  # in all decisions about them
    drafted: int = 0  # tokens that a drafter guessed
    accepted: int = 0  # of these, those that were sampled


class Busy(Exception):
    """The queue is full. `retry_after` is the estimate of seconds until it is not."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("the queue is full")
        self.retry_after = retry_after


class EngineDead(DovetailError):
    """The engine's process has ended, or could not begin; the message says why."""


class EngineRestarting(EngineDead):
    """The engine's process has ended, and is started again."""


class Client(Protocol):
    """An engine, seen from an event loop."""

    longest: int  # tokens of a prompt and its continuation together
    vocab: int  # the number of token ids
    ranks: bool  # whether the model's head scores pairs of texts

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Yield the outputs of a request. Raises Busy at once where the queue is full, EngineDead when the engine ends."""
        ...

    def abort(self, id: str) -> None:
        """End a request, if it is there: its last outputs have the finish `abort`."""

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """Let requests name an adapter of a directory. Raises InputError with the reason where it does not fit."""

    async def unload_adapter(self, name: str) -> None:
        """Take no further requests for an adapter; those that run end with it."""

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str | None) -> list[list[float]]:
        """Return the embedding of each list of token ids. Raises InputError, Busy and EngineDead."""
        ...

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], adapter: str | None) -> list[float]:
        """Return the score of each pair of texts, given as token ids and token types. Raises as `embed`."""
        ...

    def alive(self) -> bool:
        """Whether the engine answers."""
        ...

    async def ended(self) -> str:
        """Wait until the engine has ended without being asked to; return the reason."""
        ...

    def stats(self) -> Stats:
        """Return the newest statistics."""
        ...

    async def close(self) -> None:
        """End the engine; requests in flight are aborted."""
