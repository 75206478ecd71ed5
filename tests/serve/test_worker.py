"""The engine in a process of its own: real processes and sockets, a real model directory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import dovetail
from dovetail.api.engine import EngineOptions, start_engine
from dovetail.base.errors import InputError
from dovetail.decoding.generation import generate_tokens
from dovetail.serving.client import Busy, EngineDead
from dovetail.serving.request import Inbox, Output, Request, encode


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served") / "model"
    dovetail.save(dovetail.build("llama-tiny"), place)
    return place


async def outputs_of(client, request: Request) -> list[Output]:
    return [output async for output in client.submit(request)]


@pytest.mark.slow
def test_requests_abort_refusals_a_full_queue_and_the_death_of_the_process(directory: Path) -> None:
    async def program() -> None:
        client = await start_engine(directory, EngineOptions(rows=2, longest=2048, threads=1), queued=2)
        model = dovetail.load(directory)
        requests = [Request(id=str(i), prompt=tuple(range(1, 9 + i)), max_tokens=12) for i in range(4)]
        found = await asyncio.gather(*(outputs_of(client, request) for request in requests))
        for request, outputs in zip(requests, found, strict=True):
            want = list(generate_tokens(model, torch.tensor(request.prompt), 12))
            assert [token for output in outputs for token in output.tokens] == want
            assert [output.finish for output in outputs][-1] == "length"
        with pytest.raises(InputError, match="outside 0 to"):
            await outputs_of(client, Request(id="x", prompt=(10**6,), max_tokens=2))

        # a caller that stops reading aborts its request, and its blocks are free at once
        async for _ in client.submit(Request(id="y", prompt=(1, 2, 3), max_tokens=2000)):
            break
        begin = time.monotonic()
        while client.stats().running and time.monotonic() - begin < 5:
            await asyncio.sleep(0.01)
        assert client.stats().running == 0
        assert time.monotonic() - begin < 1

        long = [asyncio.create_task(outputs_of(client, Request(id=f"l{i}", prompt=(1,), max_tokens=2000))) for i in range(4)]
        await asyncio.sleep(0.2)
        with pytest.raises(Busy) as busy:
            await outputs_of(client, Request(id="more", prompt=(1,), max_tokens=1))
        assert busy.value.retry_after >= 1
        os.kill(client.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        ends = await asyncio.gather(*long, return_exceptions=True)
        assert all(isinstance(end, EngineDead) for end in ends)
        assert time.monotonic() - begin < 2
        assert not client.alive()
        with pytest.raises(EngineDead):
            await outputs_of(client, Request(id="z", prompt=(1,), max_tokens=1))
        await client.close()

    asyncio.run(program())


@pytest.mark.slow
def test_a_directory_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="no such directory"):
        asyncio.run(start_engine(tmp_path / "nothing"))


def test_messages_arrive_whole_in_any_pieces() -> None:
    messages = [{"abort": "é" * n} for n in (0, 1, 300)]
    data, inbox = b"".join(encode(message) for message in messages), Inbox()
    assert [got for i in range(len(data)) for got in inbox.push(data[i : i + 1])] == messages
    with pytest.raises(ValueError, match="limit"):
        inbox.push(b"\xff\xff\xff\xff")
