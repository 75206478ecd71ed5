"""Drafts by EAGLE: the engine's tokens are those of a run alone, each draft is that of a full forward pass over hidden states
of the model and of the depth, and sampled tokens have the distribution of the target."""

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

# layers, and the block: a KV cache returns anywhere, a recurrent state to its mark; without a decode state there is no pool
SPECS = {
    "attention": ((ATTENTION, ATTENTION), ATTENTION),
    "hybrid": ((MAMBA, ATTENTION), ATTENTION),
    "experts": ((EXPERTS, EXPERTS), ATTENTION),
    "recurrent": ((ATTENTION, ATTENTION), MAMBA),
    "no state": ((ATTENTION, ATTENTION), "{mixer: null, ffn: {hidden: 64}}"),
}
STEPS = {"attention": 260, "hybrid": 130, "experts": 150, "recurrent": 260, "no state": 260}  # the target knows the text then


def eagle(name: str, steps: int | None = None) -> Transformer:
    layers, block = SPECS[name]
    return learned(layers, (f"{{kind: eagle, weight: 1.0, block: {block}}}",), steps=steps or STEPS[name], rate=4e-3)


class ComparedAhead(Compared, DraftAhead):
    pass


class ComparedLast(Compared, DraftLast):
    pass


def compared(model: Transformer, rows: int, longest: int, drafts: int) -> Compared:
    own = own_drafter(model, rows=rows, longest=longest, drafts=drafts)
    if isinstance(own, DraftAhead):
        return ComparedAhead(model, rows=rows, longest=longest, drafts=drafts)
    return ComparedLast(model, drafts=drafts)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_without_drafts_and_drafts_those_of_a_whole_pass(name: str, temperature: float) -> None:
    model = eagle(name, 60)
    run_busy(model, compared(model, 4, 90, 5), temperature)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SPECS)
def test_greedy_drafts_of_a_trained_block_are_accepted(name: str) -> None:
    """More than of a block that is not trained, of a target that knows the text: also second and later drafts."""
    model = eagle(name)
    requests = [Request(id=str(i), prompt=prompt(9 * i, 30 + i), max_tokens=40) for i in range(4)]
    want = {(one.id, 0): alone(model, one) for one in requests}
    assert all(len(set(tokens)) > 8 for tokens in want.values())
    fractions: list[float] = []
    for target in (model, with_fresh_block(model)):
        engine = Engine(target, rows=3, longest=128, drafter=own_drafter(target, rows=3, longest=128, drafts=4), drafts=4)
        assert run(engine, *requests) == want
        stats = engine.stats()
        assert stats.drafted > 0
        fractions.append(stats.accepted / stats.drafted)
    assert fractions[0] > max(0.3, fractions[1] + 0.2), fractions


def with_fresh_block(model: Transformer) -> Transformer:
    """The same model with a block as it was before training."""
    fresh = dt.build(model.spec, seed=1).eval().double()
    weights = {path: tensor for path, tensor in model.state_dict().items() if not path.startswith("mtp.")}
    fresh.load_state_dict(weights, strict=False)
    return fresh


@pytest.mark.parametrize("drafts", [1, 7])
def test_one_block_makes_as_many_drafts_as_are_asked_for(drafts: int) -> None:
    model = eagle("attention", 60)
    engine = Engine(model, rows=1, longest=64, drafter=compared(model, 1, 64, drafts), drafts=drafts)
    request = Request(id="a", prompt=prompt(3, 20), max_tokens=12)
    assert run(engine, request)["a", 0] == alone(model, request)
    stats = engine.stats()
    assert stats.drafted >= min(drafts, 10)
    assert stats.drafted > 0


def test_drafts_end_with_the_request_at_the_longest_length() -> None:
    """The last positions of its own fit into a pool of the engine's longest length."""
    model = eagle("attention", 60)
    engine = Engine(model, rows=1, longest=32, page=4, drafter=compared(model, 1, 32, 16), drafts=16)
    request = Request(id="a", prompt=prompt(3, 12), max_tokens=20)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert engine.stats().drafted > 0


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_drafts_continue_behind_a_cached_prefix(name: str) -> None:
    model = eagle(name, 60)
    engine = Engine(model, rows=2, longest=128, page=4, drafter=own_drafter(model, rows=2, longest=128, drafts=3), drafts=3)
    request = Request(id="a", prompt=prompt(0, 41), max_tokens=40)
    want = run(engine, request)["a", 0]
    before = engine.stats()
    assert run(engine, dc.replace(request, id="b"))["b", 0] == want == alone(model, request)
    stats = engine.stats()
    assert stats.prefix_hits >= 40
    assert stats.accepted - before.accepted > 0.2 * (stats.drafted - before.drafted) > 0


def test_rows_with_different_adapters_draft_each_with_its_own() -> None:
    model, kind = eagle("attention", 60), Lora(rank=3)
    attach(model, kind)
    perturb(model, 0)
    tensors = {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}
    detach(model)
    assert any(path.startswith("mtp.") for path in tensors)
    requests = [Request(id=str(i), prompt=prompt(i, 20), max_tokens=20, adapter="one" if i % 2 else None) for i in range(4)]
    plain, drafting = (
        Engine(model, rows=4, longest=64, drafter=drafter)
        for drafter in (None, own_drafter(model, rows=4, longest=64, drafts=3))
    )
    plain.load_adapter("one", kind, tensors)
    want = run(plain, *requests)
    plain.unload_adapter("one")
    drafting.load_adapter("one", kind, tensors)
    try:
        assert run(drafting, *requests) == want
        assert drafting.stats().drafted > 0
    finally:
        drafting.unload_adapter("one")


def test_a_directory_with_a_block_drafts_by_it(tmp_path: Path) -> None:
    model = eagle("attention", 60)
    dt.save(model, tmp_path / "small")
    engine = load_engine(tmp_path / "small", EngineOptions(rows=2, longest=64, speculate="mtp", drafts=3))
    assert isinstance(engine, Engine)
    assert isinstance(engine.drafter, DraftAhead)
    request = Request(id="a", prompt=prompt(5, 30), max_tokens=20, sampling=GREEDY)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert engine.stats().accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "hybrid", "experts"])
def test_sampled_tokens_have_the_distribution_of_the_target(name: str) -> None:
    compare_distribution(eagle(name, 50))


def test_a_second_depth_is_refused() -> None:
    with pytest.raises(dt.SpecError, match="drafts any number of tokens, and is the only one") as error:
        dt.build(eagle("attention", 60).spec.set("mtp", ["eagle", "medusa"]))
    assert error.value.path == "mtp"
