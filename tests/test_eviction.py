"""Eviction in `generate` and in the engine: equal texts by every road, flat memory, and what is refused. Law 29 holds what is
kept and where it stands."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import DovetailError
from dovetail.decoding.eviction import Eviction, Policy, evicting
from dovetail.decoding.generation import PIECE, generate_tokens
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.case import perturbed
from dovetail.proof.laws.mutant import spec
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.serving.speculate import PromptLookup
from dovetail.state.pool import Pool
from dovetail.weights.adapters.attach import attach
from dovetail.weights.adapters.lora import Lora

POLICIES: tuple[Policy, ...] = ("oldest", "sinks", "attended")
TO = 12


@cache
def small() -> dt.Transformer:
    model = perturbed(spec(), seed=3)  # initial attention is nearly uniform
    assert isinstance(model, dt.Transformer)
    return model


def prompt(number: int, length: int) -> list[int]:
    return [(number * 17 + i * i * 5 + i) % 62 for i in range(length)]


def by_steps(policy: Policy, ids: list[int], steps: int) -> list[int]:
    """Greedy tokens, the prompt and all that follows fed one by one to a pool of the policy."""
    eviction = Eviction(policy, TO)
    model, given = evicting(small(), eviction), list(ids)
    pool = Pool(model.part, 1, len(ids) + steps, dtype=torch.float64, slack=0, **eviction.pool())
    for i in range(len(ids) + steps - 1):
        step = pool.step([0], [1])
        with torch.inference_mode():
            logits = model(torch.tensor([[given[i]]]), Ctx(layout=step.layout, views=step.views))
        if i + 1 >= len(ids):
            given.append(int(logits[0, -1].argmax()))
    return given[len(ids) :]


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_equals_one_token_at_a_time(policy: Policy) -> None:
    ids = prompt(1, 40)
    got = small().generate(ids, 12, evict=policy, evict_to=TO)
    assert got == by_steps(policy, ids, 12)
    assert got != small().generate(ids, 12)
    assert small().generate(ids, 12, evict=policy, evict_to=52) == small().generate(ids, 12)  # nothing is evicted


def test_a_long_prompt_is_computed_in_pieces_of_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, sizes = prompt(2, PIECE + 70), list[int]()
    step = Pool.step

    def counted(self: Pool, rows: Any, new: Any, *how: Any, **more: Any) -> Any:
        sizes.append(sum(new))
        return step(self, rows, new, *how, **more)

    monkeypatch.setattr(Pool, "step", counted)
    got = small().generate(ids, 3, evict="sinks", evict_to=TO)
    assert sizes == [PIECE, 70, 1, 1]
    monkeypatch.undo()
    eviction = Eviction("sinks", TO)
    with torch.no_grad():
        assert got[0] == int(evicting(small(), eviction)(torch.tensor([ids]))[0, -1].argmax())


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Measured(Pool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self.bytes())

    monkeypatch.setattr("dovetail.decoding.generation.Pool", Measured)
    for length in (20, 200):
        next(generate_tokens(small(), prompt(0, length), 100_000, evict=Eviction(policy, TO)))
    assert made[0] == made[1]


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "drafts"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_gives_the_tokens_of_generate(policy: Policy, drafter: PromptLookup | None) -> None:
    """Chunks of prompts, rows that join and leave, forks, cached prefixes longer than the budget, and drafts change nothing."""
    engine = Engine(small(), rows=3, longest=200, budget=24, evict=Eviction(policy, TO), drafter=drafter)
    prompts = {str(i): prompt(i, 25 + 9 * i) for i in range(4)}
    texts = run(engine, {**prompts, "again": prompts["3"]})
    follow = prompts["0"] + texts["0"] + [3, 4]
    prompts["again"], prompts["follow"] = prompts["3"], follow
    hits = engine.stats().prefix_hits
    texts |= run(engine, {"follow": follow})
    assert engine.stats().prefix_hits > max(hits, TO)
    for name, ids in prompts.items():
        assert texts[name] == small().generate(ids, 14, evict=policy, evict_to=TO), name
    if drafter is not None:
        assert engine.stats().drafted


def test_a_cached_prefix_holds_what_the_policy_left() -> None:
    engine = Engine(small(), rows=2, longest=400, budget=400, evict=Eviction("sinks", TO))
    sizes = list[int]()
    for length in (64, 320):
        run(engine, {str(length): prompt(length, length)})
        assert engine.runner.prefix is not None
        newest = list(engine.runner.prefix.stated.values())[-1]
        assert newest.states is not None
        assert newest.page is None
        sizes.append(sum(tensor.nbytes for tensor in newest.states))
    assert sizes[0] == sizes[1]


def run(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        engine.add(Request(id=name, prompt=tuple(ids), max_tokens=14))
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.busy:
        for output in engine.step():
            texts[output.id] += output.tokens
    return texts


def test_weights_adapters_and_the_model_itself_stay() -> None:
    model = dt.build(spec(), dtype=torch.float64)
    attach(model, Lora(rank=2))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    before = model.part
    held = evicting(model, Eviction("sinks", TO))
    assert dict(held.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(held.parameters(), model.parameters(), strict=True))
    assert model.part is before
    assert type(held) is type(model)
    short = torch.tensor([prompt(0, TO)])
    with torch.no_grad():
        torch.testing.assert_close(held(short), model(short), rtol=0, atol=1e-12)  # nothing is evicted yet


def test_layers_with_a_window_within_the_budget_stay() -> None:
    local = spec(mask=[{"kind": "causal"}, {"kind": "window", "size": 5}])
    model = dt.build(local)
    assert evicting(model, Eviction("sinks", TO)) is model


@pytest.mark.parametrize(
    ("mixer", "policy", "message"),
    [
        (
            {"kind": "nsa"},
            "oldest",
            r"layers.0.mixer: .*nsa caches an entry of every token, whatever its mask \(leave out evict",
        ),
        ({"kind": "mla"}, "attended", r"layers.0.mixer: mla reads the entries .*\(use evict oldest or sinks\)"),
        ({"prefix": 2}, "attended", r"layers.0.mixer.prefix: learned keys .*\(use evict oldest or sinks\)"),
        (
            {"mask": ["causal", {"kind": "window", "size": 40}]},
            "attended",
            r"layers.0.mixer.mask: .* not from all_of \(use evict",
        ),
        ({"position": {"kind": "rope", "scaling": "dynamic_ntk"}}, "sinks", r"nothing can be evicted, since dynamic_ntk"),
    ],
)
def test_a_part_that_cannot_be_held_to_a_budget_is_refused(mixer: dict[str, Any], policy: Policy, message: str) -> None:
    model = dt.from_yaml(
        "{width: 28, vocab: 62, head: {kind: lm, tied: false}, layers: [{mixer: {heads: 6, head: 12}, ffn: {hidden: 44}}]}"
    )
    model = model.swap("layers.*.mixer", mixer) if "kind" in mixer else model
    for name, value in mixer.items():
        model = model if "kind" in mixer else model.set(f"layers.*.mixer.{name}", value)
    with pytest.raises(DovetailError, match=message):
        dt.build(model).generate([1, 2, 3], 4, evict=policy, evict_to=TO)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evict_to": 8}, r"evict_to: is the budget of an eviction; choose one with evict"),
        ({"evict": "sinks", "evict_to": 4}, r"evict_to: 4 entries \(sinks takes 5 or more\)"),
        ({"evict": "oldest", "compiled": True}, r"evict: oldest is not combined with compiled; leave out one of the two"),
        ({"evict": "attended", "positions": torch.arange(3)[:, None]}, r"evict: attended is not combined with positions"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DovetailError, match=message):
        small().generate([1, 2, 3], 4, **options)


def test_the_engine_refuses_options_that_do_not_fit() -> None:
    with pytest.raises(DovetailError, match=r"evict: attended is not combined with cache; leave out one of the two"):
        Engine(small(), evict=Eviction("attended", TO), cache="int8")
    with pytest.raises(DovetailError, match=r"evict: sinks is not combined with pages"):
        Engine(small(), evict=Eviction("sinks", TO), pages=9)
