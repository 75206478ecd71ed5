"""Rows A13, A14, A16, A17, A19 and A20: the engine under sequences of calls gives the tokens of a fresh object."""

from __future__ import annotations

import pytest
import torch

import dovetail as dt
from checks.programs.engine_models import VOCAB, change_weights, logits_of, model_of
from checks.programs.interrupt import interrupted
from dovetail.base.errors import InputError, SpecError, StateError
from dovetail.decoding.generation import generate_tokens
from dovetail.model.model import ModelModule
from dovetail.proof.laws.case import perturbed
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.speculate import PromptLookup

PROMPT = tuple(range(5, 25))


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return drained(engine)


def drained(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(2000):
        if not engine.busy:
            return tokens
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
    raise AssertionError("the engine does not end")


def alone(model: ModelModule, request: Request) -> list[int]:
    return list(generate_tokens(model, torch.tensor(request.prompt), request.max_tokens, start=(1,)))


def test_a13_a_repeated_request_fits() -> None:
    engine = Engine(model_of("attention"), rows=1, longest=48)
    first = run(engine, Request(id="a", prompt=PROMPT, max_tokens=28))
    assert run(engine, Request(id="b", prompt=PROMPT, max_tokens=28))["b"] == first["a"]
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.blocks


def test_a13_two_rows_with_one_prompt_share_its_pages() -> None:
    engine = Engine(model_of("attention"), rows=2, longest=48, page=4)
    engine.add(Request(id="a", prompt=PROMPT, max_tokens=8))
    engine.add(Request(id="b", prompt=PROMPT, max_tokens=8))
    engine.step()  # both compute the prompt: neither finds the blocks of the other
    assert engine.runner.slots is not None
    assert engine.runner.slots.owned[0] == engine.runner.slots.owned[1]
    got = drained(engine)
    assert got["a"] == got["b"]


def test_a14_a_prefix_mask_beside_a_recurrent_state_is_computed_in_one_chunk() -> None:
    model = model_of("prefix with recurrence")
    for length in range(10, 20):
        request = Request(id=str(length), prompt=tuple(range(length)), max_tokens=5)
        assert run(Engine(model, rows=1, longest=48, budget=4), request)[str(length)] == alone(model, request)


@pytest.mark.parametrize("layers", ["[{mixer: {heads: 2, mask: M}}]", "[{mixer: {heads: 2}}, {mixer: {heads: 2, mask: M}}]"])
def test_a16_a_prefix_mask_without_causal_is_refused(layers: str) -> None:
    spec = dt.from_yaml(f"{{width: 12, vocab: 40, layers: {layers.replace('M', '{kind: prefix, length: 4}')}}}")
    model = perturbed(spec, 0).eval()
    with pytest.raises(SpecError, match=r"layers\.\d\.mixer: tokens see later ones.*join a prefix"):
        next(generate_tokens(model, [1, 2, 3, 4, 5], 2))
    with pytest.raises(SpecError, match="join a prefix"):
        Engine(model)
    assert spec.ahead() is None
    joined = dt.from_yaml(
        f"{{width: 12, vocab: 40, layers: {layers.replace('M', '{any: [causal, {kind: prefix, length: 4}]}')}}}"
    )
    assert joined.ahead() == 4


@pytest.mark.parametrize("name", ["dynamic NTK", "longrope"])
def test_a17_preemption_changes_no_token_and_drafts_are_refused(name: str) -> None:
    model = model_of(name)
    requests = [Request(id=str(i), prompt=tuple(range(i, i + 9)), max_tokens=12) for i in range(4)]
    engine = Engine(model, rows=4, longest=24, page=2, pages=20)
    assert run(engine, *requests) == {request.id: alone(model, request) for request in requests}
    assert engine.stats().preemptions > 0
    with pytest.raises(InputError, match=r"drafter: .* depend on the current length"):
        Engine(model, drafter=PromptLookup())


def test_a19_changed_weights_drop_cached_prefixes() -> None:
    model = model_of("attention")
    engine = Engine(model, rows=2, longest=64, page=4)
    request = Request(id="a", prompt=PROMPT, max_tokens=6)
    old = run(engine, request)["a"]
    change_weights(model, 3)
    new = alone(model, request)
    assert run(engine, request)["a"] == new != old
    assert run(engine, request)["a"] == new  # now from the cache
    assert engine.hits > 0
    weight = model.get_parameter("layers.0.mixer.o.weight")
    model.get_submodule("layers.0.mixer.o").weight = torch.nn.Parameter(weight * 1.5)  # replaced, not written to
    assert run(engine, request)["a"] == alone(model, request)


def test_a19_weights_that_change_under_a_request_give_later_tokens_of_the_new_ones() -> None:
    model = model_of("hybrid")
    engine = Engine(model, rows=1, longest=64, page=4)
    engine.add(Request(id="a", prompt=PROMPT, max_tokens=8))
    tokens = [token for _ in range(3) for output in engine.step() for token in output.tokens]
    change_weights(model, 3)
    tokens += drained(engine)["a"]
    want = logits_of("hybrid", model, PROMPT, tokens, None, None)[len(PROMPT) - 1 :].argmax(-1).tolist()
    assert tokens[3:] == want[3:]


def test_a19_training_mode_is_refused_and_nothing_is_lost() -> None:
    model = model_of("attention")
    engine = Engine(model, rows=1, longest=64)
    request = Request(id="a", prompt=PROMPT, max_tokens=6)
    engine.add(request)
    tokens = [token for output in engine.step() for token in output.tokens]
    model.train()
    with pytest.raises(InputError, match="training mode"):
        engine.step()
    with pytest.raises(InputError, match="training mode"):
        engine.add(Request(id="b", prompt=PROMPT, max_tokens=6))
    model.eval()
    assert [*tokens, *drained(engine)["a"]] == alone(model, request)


def test_a19_a_refused_request_keeps_the_cached_prefixes() -> None:
    engine = Engine(model_of("attention"), rows=1, longest=64, page=4)
    run(engine, Request(id="a", prompt=PROMPT, max_tokens=2))
    with pytest.raises(InputError, match="outside"):
        engine.add(Request(id="b", prompt=(VOCAB,), max_tokens=2))
    assert engine.stats().cached_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "recurrent", "encoder–decoder"])
def test_a20_an_interrupted_step_is_continued_rightly_wherever_it_was_interrupted(name: str) -> None:
    model, lines = model_of(name), 0
    requests = [
        Request(id="a", prompt=PROMPT, max_tokens=5),
        Request(id="b", prompt=PROMPT[:7], max_tokens=4, n=2),
    ]
    want = {request.id: alone(model, request) for request in requests}
    for after in [*range(0, 60, 7), *range(60, 1200, 61)]:
        engine, outputs = Engine(model, rows=3, longest=40, page=4, start=(1,)), list[Output]()
        for request in requests:
            engine.add(request)
        for _ in range(2):
            try:
                with interrupted(after):
                    outputs += engine.step()
            except KeyboardInterrupt:
                lines += 1
        while engine.busy:
            outputs += engine.step()
        for id, tokens in want.items():
            for index in range(2 if id == "b" else 1):
                got = [token for output in outputs if (output.id, output.index) == (id, index) for token in output.tokens]
                assert got == tokens, (after, id, index)
        assert sorted(engine.runner.free_rows) == [0, 1, 2]
    assert lines > 20


@pytest.mark.slow
def test_a20_outputs_of_a_step_that_had_happened_come_with_the_next_and_an_abort_drops_them() -> None:
    model, found = model_of("attention"), 0
    for after in range(0, 400, 3):
        engine = Engine(model, rows=1, longest=40)
        engine.add(Request(id="turn", prompt=PROMPT, max_tokens=1))
        try:
            with interrupted(after):
                engine.step()
        except KeyboardInterrupt:
            engine.abort("turn")
            engine.add(Request(id="turn", prompt=PROMPT[:3], max_tokens=2))
            assert drained(engine)["turn"] == alone(model, Request(id="turn", prompt=PROMPT[:3], max_tokens=2))
            found += 1
    assert found > 20


def test_a19_a_compiled_engine_refuses_changed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("attention")
    engine = Engine(model, rows=1, longest=40)
    engine.runner.compiled = object()  # type: ignore[assignment]  making one takes a minute; the refusal comes before its use
    change_weights(model, 1)
    with pytest.raises(StateError, match="make a new engine"):
        engine.add(Request(id="a", prompt=PROMPT, max_tokens=1))
