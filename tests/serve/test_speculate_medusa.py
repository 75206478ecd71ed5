"""Drafts by Medusa heads: the engine's tokens are those of a run alone, the drafts those of a whole pass, and sampled tokens
have the distribution of the target."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path

import pytest
from speculated import ATTENTION, EXPERTS, MAMBA, Compared, alone, compare_distribution, learned, prompt, run, run_busy

import dovetail as dt
from dovetail.api.engine import EngineOptions, load_engine
from dovetail.decoding.sampling import GREEDY
from dovetail.model.transformer import Transformer
from dovetail.proof.laws.adapted import perturb
from dovetail.serving.draft_ahead import DraftAhead, DraftLast, own_drafter
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.weights.adapters.attach import attach, detach
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.storage import adapter_tensors

HEAD, OWN = "medusa", "{kind: medusa, blocks: 2, head: {kind: lm, tied: false}}"
SPECS = {
    "attention": ((ATTENTION, ATTENTION), (HEAD, HEAD, HEAD)),
    "hybrid": ((MAMBA, ATTENTION), (HEAD, HEAD, OWN)),
    "experts": ((EXPERTS, EXPERTS), (HEAD, OWN)),
}
STEPS = {"attention": 260, "hybrid": 130, "experts": 150}  # after which the target knows the text


def trained(name: str) -> Transformer:
    return learned(*SPECS[name], steps=STEPS[name], rate=4e-3)


class ComparedLast(Compared, DraftLast):
    pass


class ComparedAhead(Compared, DraftAhead):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_without_drafts_and_drafts_those_of_a_whole_pass(name: str, temperature: float) -> None:
    model = trained(name)
    run_busy(model, ComparedLast(model, drafts=4), temperature)


def test_heads_beside_a_depth_with_a_cache() -> None:
    """Each reads what it declares: the first and last the hidden state of the model, the second that of the first."""
    model = learned((ATTENTION, ATTENTION), (HEAD, f"{{block: {ATTENTION}}}", HEAD))
    assert isinstance(own_drafter(model, rows=4, longest=90, drafts=4), DraftAhead)
    run_busy(model, ComparedAhead(model, rows=4, longest=90, drafts=4), 1.0)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SPECS)
def test_greedy_drafts_of_trained_heads_are_accepted(name: str) -> None:
    """A target that repeats one token would accept the drafts of fresh heads, too: they are counted for comparison."""
    model = trained(name)
    requests = [Request(id=str(i), prompt=prompt(9 * i, 30 + i), max_tokens=40) for i in range(4)]
    want = {(one.id, 0): alone(model, one) for one in requests}
    assert all(len(set(tokens)) > 8 for tokens in want.values())
    fractions: list[float] = []
    for target in (model, with_fresh_heads(model)):
        drafter = own_drafter(target, rows=3, longest=128, drafts=4)
        assert isinstance(drafter, DraftLast)
        engine = Engine(target, rows=3, longest=128, drafter=drafter)
        assert run(engine, *requests) == want
        stats = engine.stats()
        assert stats.drafted > 0
        fractions.append(stats.accepted / stats.drafted)
    assert fractions[0] > fractions[1] + 0.2, fractions


def with_fresh_heads(model: Transformer) -> Transformer:
    """The same model with heads as they were before training."""
    fresh = dt.build(model.spec, seed=1).eval().double()
    weights = {path: tensor for path, tensor in model.state_dict().items() if not path.startswith("mtp.")}
    fresh.load_state_dict(weights, strict=False)
    return fresh


def test_no_more_heads_are_used_than_tokens_are_drafted() -> None:
    model = trained("attention")
    drafter = DraftLast(model, drafts=1)
    engine = Engine(model, rows=1, longest=64, drafter=drafter, drafts=1)
    request = Request(id="a", prompt=prompt(3, 20), max_tokens=12)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert drafter.depths == 1
    assert 0 < engine.stats().accepted <= engine.stats().drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_a_cached_prefix_costs_no_draft(name: str) -> None:
    """The last hidden state is always computed, also where the prefix cache has the tokens before."""
    model = trained(name)
    engine = Engine(model, rows=2, longest=128, page=4, drafter=ComparedLast(model, drafts=3), drafts=3)
    request = Request(id="a", prompt=prompt(0, 41), max_tokens=40)
    want = run(engine, request)["a", 0]
    before = engine.stats()
    assert run(engine, dc.replace(request, id="b"))["b", 0] == want == alone(model, request)
    stats = engine.stats()
    assert stats.prefix_hits >= 40
    assert (stats.drafted - before.drafted, stats.accepted - before.accepted) == (before.drafted, before.accepted)


def test_rows_with_different_adapters_draft_each_with_its_own() -> None:
    model, kind = trained("attention"), Lora(rank=3)
    attach(model, kind)
    perturb(model, 0)
    tensors = {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}
    detach(model)
    assert any(path.startswith("mtp.") for path in tensors)
    requests = [Request(id=str(i), prompt=prompt(i, 20), max_tokens=20, adapter="one" if i % 2 else None) for i in range(4)]
    plain, drafting = (Engine(model, rows=4, longest=64, drafter=drafter) for drafter in (None, DraftLast(model, drafts=2)))
    plain.load_adapter("one", kind, tensors)
    want = run(plain, *requests)
    plain.unload_adapter("one")
    drafting.load_adapter("one", kind, tensors)
    try:
        assert run(drafting, *requests) == want
        assert drafting.stats().drafted > 0
    finally:
        drafting.unload_adapter("one")


def test_a_directory_with_heads_drafts_by_them(tmp_path: Path) -> None:
    model = trained("hybrid")
    dt.save(model, tmp_path / "small")
    engine = load_engine(tmp_path / "small", EngineOptions(rows=2, longest=64, speculate="mtp"))
    assert isinstance(engine, Engine)
    assert isinstance(engine.drafter, DraftLast)
    request = Request(id="a", prompt=prompt(5, 30), max_tokens=20, sampling=GREEDY)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert engine.stats().accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_sampled_tokens_have_the_distribution_of_the_target(name: str) -> None:
    compare_distribution(learned(*SPECS[name]))
