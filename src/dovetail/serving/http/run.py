"""Runs: the prompts of one HTTP request in the engine, and the pieces of its choices in the order in which they come.

The engine is freed in every case: at the end, by an error, when the client goes away, and when stop strings have ended all
choices of a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses as dc
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dovetail.serving.client import Client
from dovetail.serving.http.choice import Choice, Piece
from dovetail.serving.http.errors import LOG, ApiError
from dovetail.serving.http.logprobs import Scored
from dovetail.serving.http.metrics import Metrics
from dovetail.serving.request import Logprob, Output, Request


@dc.dataclass(eq=False)
class Job:
    """One prompt in the engine, with its n choices."""

    request: Request
    choices: Sequence[Choice]
    text: str = ""  # of the prompt, where it is echoed
    offsets: Sequence[int] = ()  # of its tokens in the text, where their log-probs are echoed
    prompt_logprobs: list[Logprob] = dc.field(default_factory=list)
    cached: int = 0

    @property
    def scored_prompt(self) -> list[Scored]:
        """The tokens of the prompt; the first has no log-prob."""
        logprobs = [None, *self.prompt_logprobs]
        return [Scored(*one) for one in zip(self.request.prompt, self.offsets, logprobs, strict=True)]

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)


class Run:
    """The jobs of one HTTP request."""

    def __init__(self, client: Client, jobs: Sequence[Job], metrics: Metrics, running: set[Run]) -> None:
        self.client, self.jobs, self.metrics, self.running = client, jobs, metrics, running
        self.first_seconds: float | None = None  # until the first token
        self.queue: asyncio.Queue[tuple[Job, Output | BaseException | None]] = asyncio.Queue()

    def abort(self) -> None:
        """End the run with an error."""
        self.queue.put_nowait((self.jobs[0], ApiError(503, "the server is shutting down", code="draining")))

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens."""
        prompt = sum(len(job.request.prompt) for job in self.jobs)
        generated = sum(choice.count for job in self.jobs for choice in job.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in self.jobs)},
        }

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield what is new; raise ApiError, Busy or EngineDead."""
        clock = self.metrics.clock()
        tasks = {job: asyncio.create_task(self._pump(job)) for job in self.jobs}
        self.running.add(self)
        try:
            while tasks:
                job, item = await self.queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    if not job.finished:
                        raise ApiError(500, "the engine ended a request without its last token")
                    tasks.pop(job, None)
                elif job in tasks:
                    clock.tick(len(item.tokens))
                    clock.begun(item)
                    self.first_seconds = None if clock.first is None else clock.first - clock.begin
                    if (piece := _pushed(job, item)) is not None:
                        yield piece
                    if job.finished and item.finish is None:  # by stop strings: the engine would go on
                        tasks.pop(job).cancel()
                        self.client.abort(job.request.id)
            clock.end([choice.finish or "stop" for job in self.jobs for choice in job.choices])
        except BaseException as error:
            clock.end(["error" if isinstance(error, Exception) else "abort"])
            raise
        finally:
            self.running.discard(self)
            for job, task in tasks.items():
                task.cancel()
                self.client.abort(job.request.id)

    async def _pump(self, job: Job) -> None:
        try:
            async for output in self.client.submit(job.request):
                self.queue.put_nowait((job, output))
            self.queue.put_nowait((job, None))
        except Exception as error:
            self.queue.put_nowait((job, error))


def _pushed(job: Job, output: Output) -> Piece | None:
    """Add an output to its choice; raise where the engine gave up."""
    choice = job.choices[output.index]
    job.cached = max(job.cached, output.cached)
    job.prompt_logprobs += output.prompt_logprobs
    if choice.finish is None and output.finish == "abort":
        raise ApiError(503, "the request was aborted by the server", code="aborted")
    if output.finish == "error":
        LOG.error("the engine failed on request %s: %s", job.request.id, output.message)
        raise ApiError(500, "the engine failed on this request", code="engine_error")
    if output.finish == "refused":
        raise ApiError(400, output.message, code="grammar_refused")
    return choice.push(output)


def now() -> int:
    """Return the time of an answer, in seconds since 1970."""
    return int(time.time())
