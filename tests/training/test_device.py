"""Training on a device: batches are made on the CPU and move there; nothing else is made elsewhere, and a step waits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail import from_yaml
from dovetail.data.corpus import Batch, Corpus
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn import host
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.device import META, DeviceWatch
from dovetail.training import loop, step
from dovetail.training.objective import MaskedTokens, Objective, next_token, seq2seq
from dovetail.training.plan import Plan

DECODER = """
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 10, dropout: 0.1}, ffn: {hidden: 44}}
- {mixer: {kind: mamba2, head: 14}, ffn: {kind: moe, experts: 3, router: {top_k: 2, balance_bias: true}}}
"""
ENCODER = """
width: 28
vocab: 62
layers: [{mixer: {heads: 6, head: 10, mask: full}, ffn: {hidden: 44}}]
head: masked_lm
"""
BOTH = """
width: 28
vocab: 62
encoder: {width: 22, vocab: 62, head: null, layers: [{mixer: {heads: 2, mask: full, position: none}, ffn: {hidden: 36}}]}
layers: [{mixer: {heads: 6, head: 10}, cross: {kind: cross_attention, heads: 4, head: 10}, ffn: {hidden: 44}}]
"""
STEPS = 3


def batches() -> list[Batch]:
    """One batch per step, and two held-out ones, on the CPU."""
    corpus = Corpus.cut(torch.arange(400) % 62, 19)
    made = [corpus.batch(0, step, 3, 19) for step in range(STEPS)] + list(corpus.validation(1, 19, most=2))
    source = TokenLayout.padded([11, 4, 7], 11)
    return [Batch(b.tokens, b.labels, b.layout, torch.ones(3, 11, dtype=torch.long), source) for b in made[:STEPS]] + made[
        STEPS:
    ]


def run(spec: Model, objective: Objective, device: str | torch.device, given: list[Batch]) -> list[float]:
    """The losses of a run with evals."""
    model = build(spec, device=device)
    plan = Plan(steps=STEPS, quiet=True, evals=2)
    held_out = given[STEPS:] if spec.encoder is None else given[:1]
    return [metrics.loss for metrics in loop.train(model, given.__getitem__, objective, plan, held_out)]


CASES: list[Any] = [(DECODER, next_token), (ENCODER, MaskedTokens(mask=3, vocab=62)), (BOTH, seq2seq)]


@pytest.mark.parametrize(("text", "objective"), CASES, ids=["decoder", "masked tokens", "seq2seq"])
def test_training_stays_on_its_device_and_a_step_waits_once(
    text: str, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    own = host.read_floats

    def counted(*values: Tensor) -> list[float]:
        reads.append(len(values))
        return own(*values)

    for module in (loop, step):
        monkeypatch.setattr(module, "read_floats", counted)
    given = batches()
    with DeviceWatch() as watch:
        run(from_yaml(text), objective, META, given)
    assert watch.found == []
    assert len(reads) == STEPS + 2  # of each step its loss and the norm of its gradient, and one for each eval


def test_a_batch_that_stays_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batches()
    monkeypatch.setattr(Batch, "to", lambda self, device: self)
    with pytest.raises(RuntimeError), DeviceWatch():  # torch itself refuses to look up ids of another device
        run(from_yaml(DECODER), next_token, META, given)


def test_a_layout_moves_with_all_that_it_holds() -> None:
    layout = TokenLayout.flat([3, 2], [4, 0])
    moved = layout.to("meta")
    assert {moved.order.device, moved.seg.device, moved.sample.device, moved.row.device} == {META}  # type: ignore[union-attr]
    assert (moved.rows, moved.known, moved.start) == (layout.rows, layout.known, layout.start)
    assert layout.to("cpu") is layout
