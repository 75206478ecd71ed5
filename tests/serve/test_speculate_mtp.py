"""Drafts by the model's own multi-token prediction: the engine's tokens are those of a run alone, and the drafts those of a
whole pass over all tokens, whatever joins, leaves, forks or is preempted in between."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path

import pytest
import torch
from speculated import ATTENTION, EXPERTS, MAMBA, Compared, alone, learned, prompt, run, run_busy

import dovetail as dt
from dovetail.api.engine import EngineOptions, load_engine
from dovetail.base.errors import SpecError
from dovetail.decoding.sampling import GREEDY
from dovetail.files.spec import load_spec
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.adapted import perturb
from dovetail.serving.draft_ahead import DraftAhead
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.serving.schedule import Continuation
from dovetail.weights.adapters.attach import attach, detach
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.storage import adapter_tensors

# layers, and the block of each depth: recurrent states of the target and of the depths return to a mark, KV caches anywhere
SPECS = {
    "attention": ([ATTENTION, ATTENTION], [ATTENTION, ATTENTION]),
    "hybrid": ([MAMBA, ATTENTION], [MAMBA, ATTENTION]),
    "experts": ([EXPERTS, EXPERTS], [EXPERTS]),
    "one recurrent depth": ([ATTENTION, ATTENTION], [MAMBA]),
}


def trained(name: str) -> Transformer:
    layers, depths = SPECS[name]
    return learned(tuple(layers), tuple(f"{{block: {block}, weight: 1.0}}" for block in depths))


class ComparedAhead(Compared, DraftAhead):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_without_drafts_and_drafts_those_of_a_whole_pass(name: str, temperature: float) -> None:
    model = trained(name)
    run_busy(model, ComparedAhead(model, rows=4, longest=90, drafts=4), temperature)


@pytest.mark.quick(1)
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SPECS)
def test_greedy_drafts_of_a_trained_model_are_accepted(name: str) -> None:
    model = trained(name)
    requests = [Request(id=str(i), prompt=prompt(9 * i, 30 + i), max_tokens=40) for i in range(4)]
    drafter = DraftAhead(model, rows=3, longest=128, drafts=4)
    engine = Engine(model, rows=3, longest=128, drafter=drafter)
    assert run(engine, *requests) == {(one.id, 0): alone(model, one) for one in requests}
    stats = engine.stats()
    assert stats.accepted > 0.4 * stats.drafted > 0


def test_no_more_depths_are_used_than_tokens_are_drafted() -> None:
    model = trained("attention")
    drafter = DraftAhead(model, rows=1, longest=64, drafts=1)
    engine = Engine(model, rows=1, longest=64, drafter=drafter, drafts=1)
    request = Request(id="a", prompt=prompt(3, 20), max_tokens=12)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert drafter.depths == 1
    assert 0 < engine.stats().accepted <= engine.stats().drafted


@pytest.mark.parametrize("name", SPECS)
def test_a_continuation_that_returns_with_all_tokens_but_one_computed_has_its_drafts(name: str) -> None:
    """It was preempted, and a step computed all that it had but its last token."""
    model, tokens = trained(name), list(prompt(3, 40))
    drafter = ComparedAhead(model, rows=1, longest=64, drafts=4)
    one = Continuation(Request(id="a", prompt=tuple(tokens[:5]), max_tokens=50), 0, (0, 0), tokens, 5, row=0)
    hidden = model.hidden(torch.tensor([tokens[:-1]]), Ctx(layout=TokenLayout.whole(1, len(tokens) - 1)))[0][0]
    drafter.observe(one, 0, hidden)
    first = drafter.draft([one], [4])  # compared with a whole pass
    assert len(first[0]) == len(SPECS[name][1])
    assert drafter.draft([one], [4]) == first  # no step followed


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_drafts_continue_behind_a_cached_prefix(name: str) -> None:
    model = trained(name)
    engine = Engine(model, rows=2, longest=128, page=4, drafter=DraftAhead(model, rows=2, longest=128, drafts=2))
    request = Request(id="a", prompt=prompt(0, 41), max_tokens=40)
    want = run(engine, request)["a", 0]
    before = engine.stats()
    assert run(engine, dc.replace(request, id="b"))["b", 0] == want == alone(model, request)
    stats = engine.stats()
    assert stats.prefix_hits >= 40
    assert stats.accepted - before.accepted > 0.3 * (stats.drafted - before.drafted) > 0


def test_rows_with_different_adapters_draft_each_with_its_own() -> None:
    model, kind = trained("attention"), Lora(rank=3)
    attach(model, kind)
    perturb(model, 0)
    tensors = {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}
    detach(model)
    requests = [Request(id=str(i), prompt=prompt(i, 20), max_tokens=20, adapter="one" if i % 2 else None) for i in range(4)]
    plain, drafting = (
        Engine(model, rows=4, longest=64, drafter=drafter)
        for drafter in (None, DraftAhead(model, rows=4, longest=64, drafts=2))
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


def test_a_directory_with_multi_token_prediction_drafts_by_it(tmp_path: Path) -> None:
    model = trained("hybrid")
    dt.save(model, tmp_path / "small")
    engine = load_engine(tmp_path / "small", EngineOptions(rows=2, longest=64, speculate="mtp"))
    assert isinstance(engine, Engine)
    request = Request(id="a", prompt=prompt(5, 30), max_tokens=20, sampling=GREEDY)
    assert run(engine, request)["a", 0] == alone(model, request)
    assert engine.stats().accepted > 0


def test_a_model_without_multi_token_prediction_is_refused(tmp_path: Path) -> None:
    dt.save(dt.build(load_spec("llama-tiny")).eval(), tmp_path / "plain")
    with pytest.raises(SpecError, match="mtp: the model has no multi-token prediction"):
        load_engine(tmp_path / "plain", EngineOptions(rows=1, longest=32, speculate="mtp"))
