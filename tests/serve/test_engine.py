"""The engine against single runs: whatever else runs, waits, is aborted, preempted, forked or found in the prefix cache, a
request gets the tokens that it gets alone."""

from __future__ import annotations

import dataclasses as dc
import random
from functools import cache

import pytest
import torch

from dovetail.base.errors import InputError
from dovetail.decoding.generation import generate_tokens
from dovetail.decoding.sampling import Sampling
from dovetail.files.spec import load_spec
from dovetail.model.model import ModelModule
from dovetail.proof.laws.case import perturbed
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.speculate import Drafter, DraftModel, PromptLookup

QUICK = ["llama-tiny", "mamba2-hybrid-tiny"]
OTHERS = [
    "gpt2-tiny",
    "mamba2-tiny",
    "jamba-tiny",
    "deepseek-tiny",
    "nsa-tiny",
    "gemma-2-tiny",
    "mixtral-tiny",
    "rwkv6-tiny",
    "gated-deltanet-hybrid-tiny",
    "performer-tiny",
    "sparse-transformer-tiny",
    "t5-tiny",
]
START = (1,)  # the first decoder token of an encoder–decoder


@cache
def model_of(name: str) -> ModelModule:
    return perturbed(load_spec(name), 0).eval()


def alone(model: ModelModule, request: Request) -> list[int]:
    return list(
        generate_tokens(
            model, torch.tensor(request.prompt), request.max_tokens, request.sampling, stop=request.stop, start=START
        )
    )


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.add(request)
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
    return joined(outputs)


def joined(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    return tokens


def idle(engine: Engine) -> None:
    """Nothing is held but cached prefixes."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.blocks
    if engine.runner.slots is not None:  # the count is kept up to date, and not taken by a search
        assert stats.cached_blocks == sum(engine.runner.slots.uses[page] == 1 for page in engine.runner.slots.kept)
    assert sorted(engine.runner.free_rows) == list(range(engine.runner.rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_random_program_of_requests_gives_each_its_own_tokens(name: str) -> None:
    model, rng = model_of(name), random.Random(7)
    vocab = model.part.vocab
    engine = Engine(model, rows=4, longest=100, budget=24, page=4, pages=26, start=START)
    shared = [rng.randrange(vocab) for _ in range(40)]
    requests: list[Request] = []
    for i in range(16):
        prompt = [*shared[: rng.choice([0, 4, 8, 13, 30])], *(rng.randrange(vocab) for _ in range(rng.randrange(1, 20)))]
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), top_p=0.9, seed=i)
        n = rng.choice([1, 1, 2])
        requests.append(Request(id=str(i), prompt=tuple(prompt), max_tokens=rng.randrange(1, 24), sampling=sampling, n=n))
    todo, outputs, aborted = list(requests), list[Output](), set[str]()
    while todo or engine.busy:
        if todo and rng.random() < 0.4:
            engine.add(todo.pop())
        if engine.requests and rng.random() < 0.03:
            aborted.add(rng.choice(list(engine.requests)))
            outputs += engine.abort(sorted(aborted)[-1]) if sorted(aborted)[-1] in engine.requests else []
        outputs += engine.step()
    got = joined(outputs)
    for request in requests:
        for index in range(request.n):
            sampling = dc.replace(request.sampling, seed=request.sampling.seed + index)
            want, found = alone(model, dc.replace(request, sampling=sampling)), got.get((request.id, index), [])
            assert found == (want[: len(found)] if request.id in aborted else want), request
    idle(engine)
    stats = engine.stats()
    if engine.runner.prefix is not None:
        assert stats.prefix_hits > 0
    if stats.blocks and model.part.encoder is None:
        assert stats.preemptions > 0


def test_a_second_prompt_continues_from_the_blocks_of_the_first() -> None:
    engine = Engine(model_of("llama-tiny"), rows=2, longest=64, page=4)
    prompt = tuple(range(3, 25))
    first = run(engine, Request(id="a", prompt=prompt, max_tokens=6))
    computed = engine.stats().prompt_tokens
    second = run(engine, Request(id="b", prompt=prompt, max_tokens=6))
    assert second["b", 0] == first["a", 0]
    assert engine.stats().prompt_tokens - computed == 2  # of 22 tokens, 20 are in five whole blocks


def test_another_salt_shares_nothing() -> None:
    engine = Engine(model_of("llama-tiny"), rows=2, longest=64, page=4)
    run(engine, Request(id="a", prompt=tuple(range(3, 25)), max_tokens=2, salt="one"))
    run(engine, Request(id="b", prompt=tuple(range(3, 25)), max_tokens=2, salt="two"))
    assert engine.stats().prefix_hits == 0


def test_several_continuations_compute_their_prompt_once() -> None:
    engine = Engine(model_of("llama-tiny"), rows=4, longest=64, page=4)
    sampling = Sampling(temperature=3.0, seed=5)
    got = run(engine, Request(id="a", prompt=tuple(range(3, 24)), max_tokens=8, n=3, sampling=sampling))
    assert engine.stats().prompt_tokens == 21
    for index in range(3):
        request = Request(id="b", prompt=tuple(range(3, 24)), max_tokens=8, sampling=dc.replace(sampling, seed=5 + index))
        assert got["a", index] == alone(model_of("llama-tiny"), request)
    assert len({tuple(tokens) for tokens in got.values()}) == 3
    idle(engine)


def test_log_probs_of_prompt_and_tokens_are_those_of_a_whole_pass() -> None:
    model = model_of("llama-tiny")
    engine = Engine(model, rows=2, longest=64, page=4, budget=5)
    prompt = tuple(range(3, 20))
    engine.add(Request(id="a", prompt=prompt, max_tokens=4, logprobs=2, prompt_logprobs=1))
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
    tokens = [token for output in outputs for token in output.tokens]
    scored = [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(whole(model, ids), -1)[0]
    assert [one.token for one in scored] == ids[0, 1:].tolist()
    for i, one in enumerate(scored):
        assert one.logprob == pytest.approx(float(logprobs[i, one.token]), abs=1e-5)
        assert one.top[0][1] == pytest.approx(float(logprobs[i].max()), abs=1e-5)


def whole(model: ModelModule, ids: torch.Tensor) -> torch.Tensor:
    from dovetail.nn.inputs import default_ctx

    return model(ids, default_ctx(ids))


def test_tokens_that_end_wait_for_the_fewest_tokens() -> None:
    model = model_of("llama-tiny")
    request = Request(id="a", prompt=(3, 4, 5), max_tokens=8)
    first = alone(model, request)[0]
    stopping = dc.replace(request, stop=frozenset([first]))
    assert run(Engine(model, rows=1, longest=32), stopping)["a", 0] == [first]
    later = run(Engine(model, rows=1, longest=32), dc.replace(stopping, min_tokens=3))["a", 0]
    assert len(later) >= 4
    assert first not in later[:3]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": ()}, "is empty"),
        ({"prompt": (10**6,)}, "outside 0 to"),
        ({"n": 10**9}, "not from 1 to"),
        ({"max_tokens": 2**63}, "more than 32"),
        ({"max_tokens": 0}, "not 1 or more"),
    ],
)
def test_a_request_that_can_never_run_is_refused(wrong: dict[str, object], words: str) -> None:
    engine = Engine(model_of("llama-tiny"), rows=1, longest=32)
    with pytest.raises(InputError, match=words):
        engine.add(dc.replace(Request(id="a", prompt=(1,), max_tokens=4), **wrong))  # type: ignore[arg-type]
    assert not engine.busy


class Guesses(Drafter):
    """A drafter that is right for some tokens, then wrong."""

    def __init__(self, known: dict[str, list[int]], right: int, vocab: int) -> None:
        self.known, self.right, self.vocab = known, right, vocab

    def draft(self, ones, counts):
        guesses = []
        for one, count in zip(ones, counts, strict=True):
            done = len(one.generated)
            guess = self.known[one.request.id][done : done + count]
            guesses.append([token if i < self.right else (token + 1) % self.vocab for i, token in enumerate(guess)])
        return guesses


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["llama-tiny", "mamba2-hybrid-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_drafts_right_and_wrong_change_no_token(name: str, temperature: float) -> None:
    model = model_of(name)
    requests = [
        Request(id=str(i), prompt=tuple(range(i, 9 + 3 * i)), max_tokens=11, sampling=Sampling(temperature=temperature, seed=i))
        for i in range(3)
    ]
    want = {request.id: alone(model, request) for request in requests}
    for right in (0, 2, 4):
        engine = Engine(model, rows=3, longest=64, page=4, drafter=Guesses(want, right, model.part.vocab))
        assert run(engine, *requests) == {(id, 0): tokens for id, tokens in want.items()}
        stats = engine.stats()
        assert stats.drafted > 0
        assert (stats.accepted == 0) == (right == 0)
        idle(engine)


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_and_prompt_look_up_change_no_token(temperature: float) -> None:
    model = model_of("llama-tiny")
    sampling = Sampling(temperature=temperature, seed=3)
    requests = [Request(id=str(i), prompt=(5, 6, 7, 8) * (i + 2), max_tokens=20, sampling=sampling) for i in range(3)]
    want = {(request.id, 0): alone(model, request) for request in requests}
    itself = DraftModel(model, rows=2, longest=64, target=model)
    hybrid = DraftModel(dated("mamba2-hybrid-tiny", model.part.vocab), rows=2, longest=64, target=model)
    for drafter in (PromptLookup(), itself, hybrid):
        engine = Engine(model, rows=2, longest=64, page=4, drafter=drafter)
        assert run(engine, *requests) == want
        if drafter is itself:  # it guesses every token, up to near-ties between a batch and a row alone
            assert engine.stats().accepted >= 0.95 * engine.stats().drafted > 0


def dated(name: str, vocab: int) -> ModelModule:
    return perturbed(load_spec(name).set("vocab", vocab), 0).eval()


@pytest.mark.parametrize(("name", "passes"), [("llama-tiny", 1), ("mamba2-hybrid-tiny", 2)])
def test_prompts_run_beside_rows_that_decode_in_one_pass_where_the_state_is_a_kv_cache(
    name: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = model_of(name), list[torch.Size]()
    engine = Engine(model, rows=3, longest=64)
    engine.add(Request(id="a", prompt=(5, 7, 11), max_tokens=8))
    engine.step()
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, ctx: (counted.append(ids.shape), hidden(ids, ctx))[1])
    engine.add(Request(id="b", prompt=tuple(range(4, 20)), max_tokens=2))
    engine.step()
    assert len(counted) == passes
    assert sum(size.numel() for size in counted) == 1 + 16
