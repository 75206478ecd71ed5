"""A real model behind the `Client` protocol: each request is decoded in a thread, one after the other of its choices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dovetail.base.errors import InputError
from dovetail.decoding.embedding import Embedder
from dovetail.decoding.sampling import sample_tokens, top_logprobs
from dovetail.decoding.steps import Decoder
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.serving.client import Busy, EngineDead, Stats
from dovetail.serving.request import Logprob, Output, Request
from dovetail.state.pool import Pool

OUT = -1e9  # logit of a token that may not be sampled yet


class SmallEngine:
    """`pace` seconds per token; `room` requests at once, more are refused; `without` are tokens of probability 0."""

    def __init__(
        self, model: Transformer, *, longest: int = 512, room: int = 64, pace: float = 0.0, without: Sequence[int] = ()
    ) -> None:
        self.model, self.longest, self.vocab, self.room, self.pace = model, longest, model.spec.vocab, room, pace
        self.threads = ThreadPoolExecutor(8)
        self.mask = torch.zeros(self.vocab)
        self.mask[list(without)] = OUT
        self.live: dict[str, threading.Event] = {}  # set: aborted
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.steps = self.prompt_tokens = 0
        self.dead = threading.Event()

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        if self.dead.is_set():
            raise EngineDead
        if len(self.live) >= self.room:
            raise Busy(1.5)
        self.requests.append(request)
        queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
        loop, stop = asyncio.get_running_loop(), threading.Event()
        self.live[request.id] = stop

        def put(item: Output | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def work() -> None:
            try:
                self._run(request, stop, put)
                put(EngineDead() if self.dead.is_set() else None)
            except BaseException as error:
                put(error)

        self.threads.submit(work)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            self.live.pop(request.id, None)

    @torch.inference_mode()
    def _run(self, request: Request, stop: threading.Event, put) -> None:
        self.prompt_tokens += len(request.prompt)
        scored = self._scored(request)
        for index in range(request.n):
            if request.max_tokens == 0:
                put(Output(id=request.id, index=index, finish="length", prompt_logprobs=[] if index else scored))
                continue
            self._decode(request, index, [] if index else scored, stop, put)

    def _scored(self, request: Request) -> list[Logprob]:
        if request.prompt_logprobs is None:
            return []
        ids = torch.tensor([request.prompt])
        logits = self.model(ids, Ctx(layout=TokenLayout.whole(1, len(request.prompt))))[0] + self.mask
        return [
            Logprob(token, *top_logprobs(row, token, request.prompt_logprobs))
            for row, token in zip(logits[:-1], request.prompt[1:], strict=True)
        ]

    def _decode(self, request: Request, index: int, scored: list[Logprob], stop: threading.Event, put) -> None:
        pool = Pool(self.model.spec, 1, len(request.prompt) + request.max_tokens)
        decoder, inputs, made = Decoder(self.model, pool), torch.tensor(request.prompt), list[int]()
        how = request.sampling.__class__(**{**request.sampling.__dict__, "seed": request.sampling.seed + index})
        while True:
            if stop.is_set() or self.dead.is_set():
                return put(Output(id=request.id, index=index, finish="abort"))
            logits = decoder.step(inputs[None], [0]).float() + self.mask
            self.steps += 1
            barred = logits.clone()
            if len(made) < request.min_tokens:
                barred[:, sorted(request.stop)] = OUT
            (token,) = sample_tokens(barred, [how], [request.prompt], [made])
            logprob = [] if request.logprobs is None else [Logprob(token, *top_logprobs(logits[0], token, request.logprobs))]
            made.append(token)
            finish = "stop" if token in request.stop else "length" if len(made) == request.max_tokens else None
            first = scored if len(made) == 1 else []
            put(Output(id=request.id, index=index, tokens=[token], logprobs=logprob, prompt_logprobs=first, finish=finish))
            if finish:
                return None
            inputs = torch.tensor([token])
            time.sleep(self.pace)

    def abort(self, id: str) -> None:
        if id in self.live:
            self.aborted.append(id)
            self.live[id].set()

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        raise InputError("adapter: this engine has none")

    async def unload_adapter(self, name: str) -> None:
        raise InputError("adapter: this engine has none")

    ranks = False

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str | None) -> list[list[float]]:
        embedder = Embedder(self.model)
        return [embedder.vector(one).tolist() for one in texts]

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], adapter: str | None) -> list[float]:
        raise InputError("score: the model has no head for pairs")

    def alive(self) -> bool:
        return not self.dead.is_set()

    async def ended(self) -> str:
        await asyncio.get_running_loop().run_in_executor(None, self.dead.wait)
        return "the engine of the tests has ended"

    def stats(self) -> Stats:
        return Stats(running=len(self.live), blocks=10, free_blocks=10, prompt_tokens=self.prompt_tokens)

    async def close(self) -> None:
        self.threads.shutdown(wait=False)
