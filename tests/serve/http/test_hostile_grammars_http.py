"""Hostile grammars cost their sender, and nobody else: compiled by forks, in turns, and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import httpx2
import pytest
from http_server import TEMPLATE
from real_server import Real, real_server, write_directory

from dovetail.base.limits import GRAMMAR_SECONDS
from dovetail.decoding.generation import Vocabulary
from dovetail.serving.client import Busy
from dovetail.serving.http.errors import ApiError
from dovetail.serving.http.grammars import FairSlots, GrammarChecker
from dovetail.serving.http.prompts import PromptEncoder
from dovetail.text.grammar import regex_grammar

NESTED = "((((a{{50}}){{50}}){{50}}){{50}})x{}"  # 6 million letters
DOTS = ".*" * 3000
BYSTANDER, BUSY = (
    3.0,
    8,
)  # seconds in which an innocent grammar is answered; on a busy machine, times what it takes without others


@pytest.fixture(scope="module")
def real(trained, tmp_path_factory):
    model, vocabulary = trained
    place = tmp_path_factory.mktemp("hostile")
    (place / "keys").write_text("-\nhostile\n")
    directory = write_directory(model, vocabulary, place / "model", TEMPLATE)
    with real_server(directory, f"--api-key-file={place}/keys") as server:
        yield server


def asked(real: Real, key: str, pattern: str) -> httpx2.Response:
    body = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "guided_regex": pattern}
    return httpx2.post(f"{real.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.mark.slow
def test_b4_an_innocent_grammar_is_answered_beside_hostile_ones(real: Real) -> None:
    assert asked(real, "-", "ready").status_code == 200  # the process has read the tokenizer
    begin = time.monotonic()
    assert asked(real, "-", "steady").status_code == 200
    alone = time.monotonic() - begin
    statuses = list[int]()

    def attack(number: int) -> None:
        pattern = NESTED.format(number) if number % 2 else DOTS + str(number)
        with contextlib.suppress(httpx2.TimeoutException):
            statuses.append(asked(real, "hostile", pattern).status_code)

    attacks = [threading.Thread(target=attack, args=(i,)) for i in range(10)]
    for one in attacks:
        one.start()
    time.sleep(0.3)
    times = list[float]()
    for i in range(4):
        begin = time.monotonic()
        answer = asked(real, "-", f"ok{i}")
        times.append(time.monotonic() - begin)
        assert answer.status_code == 200, answer.text
    for one in attacks:
        one.join()
    assert max(times) < max(BYSTANDER, BUSY * alone), (times, alone)
    assert set(statuses) <= {200, 400, 429, 503}  # 200: the nested one compiles, slowly; 503: too slowly, on a busy machine


def checker(vocabulary: Vocabulary) -> GrammarChecker:
    return GrammarChecker(PromptEncoder(vocabulary, 512, 300))


def test_b4_a_refused_grammar_is_remembered_and_equal_ones_are_compiled_once(trained) -> None:
    async def run() -> None:
        grammars = checker(trained[1])
        hostile = regex_grammar(DOTS)
        first = await asyncio.gather(*(grammars.source(hostile, str(i)) for i in range(20)), return_exceptions=True)
        assert all(isinstance(one, ApiError) and one.status == 400 for one in first)
        spent = next(grammars.process.numbers)
        assert spent <= 2  # both lanes, once
        with pytest.raises(ApiError, match="regex"):
            await grammars.source(hostile, "another")
        assert next(grammars.process.numbers) == spent + 1
        assert await grammars.source(regex_grammar("yes|no"), "a")
        await grammars.close()

    asyncio.run(run())


def test_b4_a_grammar_has_bounds_on_time_and_memory(trained) -> None:
    async def run() -> None:
        grammars = checker(trained[1])
        for pattern in (DOTS, "(" * 5000 + "a" + ")*" * 5000):
            begin = time.monotonic()
            with pytest.raises(ApiError) as refused:
                await grammars.source(regex_grammar(pattern), "a")
            assert refused.value.code == "grammar_refused", pattern
            assert time.monotonic() - begin < 20 * GRAMMAR_SECONDS
        assert grammars.process.process is not None  # the forks ended, not the process
        assert grammars.process.process.returncode is None
        children = Path(f"/proc/{grammars.process.process.pid}/task/{grammars.process.process.pid}/children").read_text()
        assert not children.split()
        await grammars.close()

    asyncio.run(run())


def test_b4_tenants_take_turns() -> None:
    async def run() -> None:
        slots, order = FairSlots(1, waiting=8), list[str]()

        async def work(tenant: str) -> None:
            async with slots.turn(tenant, 1.0):
                order.append(tenant)
                await asyncio.sleep(0)

        crowd = [asyncio.create_task(work("many")) for _ in range(6)]
        await asyncio.sleep(0)
        gone = asyncio.create_task(work("gone"))
        few = asyncio.create_task(work("few"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*crowd, few)
        assert order.index("few") <= 2, order
        assert len(order) == 7
        assert not slots.running
        assert not slots.waiting
        full = [asyncio.create_task(work("many")) for _ in range(12)]
        results = await asyncio.gather(*full, return_exceptions=True)
        assert [type(one) for one in results].count(Busy) == 3  # one runs, eight wait

    asyncio.run(run())


def test_b4_a_tenant_leaves_a_slot_to_others() -> None:
    async def run() -> None:
        slots, begun, end = FairSlots(3, waiting=8), list[str](), asyncio.Event()

        async def work(tenant: str) -> None:
            async with slots.turn(tenant, 1.0):
                begun.append(tenant)
                await end.wait()

        tasks = [asyncio.create_task(work("many")) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert begun == ["many", "many"]
        tasks.append(asyncio.create_task(work("few")))
        await asyncio.sleep(0.01)
        assert begun == ["many", "many", "few"]
        end.set()
        await asyncio.gather(*tasks)
        assert len(begun) == 6

    asyncio.run(run())


def test_b4_grammars_that_are_compiled_at_once_are_not_confused(trained) -> None:
    async def run() -> None:
        grammars = checker(trained[1])
        sources = await asyncio.gather(*(grammars.source(regex_grammar(f"word{i}"), str(i % 3)) for i in range(30)))
        assert [f"word{i}" in one for i, one in enumerate(sources)] == [True] * 30
        await grammars.close()

    asyncio.run(run())
