"""Preference objectives: known values and gradients, sums over pieces, references that are stored, and runs that learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tuning_base import base, write_rows

import dovetail as dt
from dovetail.base.errors import UsageError
from dovetail.training.objective import TuningData
from dovetail.training.plan import Plan
from dovetail.training.preference import Dpo, Ipo, Kto, Orpo, RewardModel, reference_log_probs, scores
from dovetail.training.source import BatchShape
from dovetail.training.step import Trainer
from dovetail.training.task import TUNING

RUN = {"batch": 4, "length": 32, "quiet": True, "learning_rate": 3e-3, "steps": 25}
PAIRED = (Dpo, Ipo, Orpo)


def pairs(path: Path, count: int = 40) -> Path:
    return write_rows(
        path, [{"prompt": f"What is {i}?", "chosen": " It is blue.", "rejected": " red, no"} for i in range(count)]
    )


def judged(path: Path) -> Path:
    rows = [
        {"prompt": f"What is {i}?", "completion": " blue" if i % 2 else " red, no", "label": bool(i % 2)} for i in range(40)
    ]
    return write_rows(path, rows)


def source_of(kind, directory: Path, path: Path, batch: int = 4):
    model = dt.load(directory).double()
    data = TuningData(model.vocabulary, str(directory), {})
    source = kind.read(path, model.spec, BatchShape(batch, 32, 0), lambda _: None, data)
    with torch.no_grad():
        rows = [reference_log_probs(model, source.table(np.arange(i, i + 1))) for i in range(source.table.count)]
    source.table.columns["reference"] = torch.cat(rows)
    return model, source


def moved(model, by: float = 0.05):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()), dtype=weight.dtype)
            )
    return model


def test_the_initial_weights_have_the_loss_log_2(tmp_path):
    model, source = source_of(Dpo, base(tmp_path / "base"), pairs(tmp_path / "x.jsonl"))
    loss = Dpo()(model, source.batch(0), 0, True)
    assert loss.mean().item() == pytest.approx(math.log(2), rel=1e-12)
    ipo = Ipo(beta=0.2)(model, source.batch(0), 0, True)
    assert ipo.mean().item() == pytest.approx((1 / 0.4) ** 2, rel=1e-12)


def test_identical_answers_have_no_gradient_and_swapped_ones_the_opposite(tmp_path):
    place = base(tmp_path / "base")
    same = write_rows(tmp_path / "same.jsonl", [{"prompt": f"a {i}", "chosen": " red", "rejected": " red"} for i in range(20)])
    model, source = source_of(Dpo, place, same)
    Dpo()(moved(model), source.batch(0), 0, True).sum.backward()
    assert max(float(weight.grad.abs().max()) for weight in model.parameters()) < 1e-12
    model, source = source_of(Dpo, place, pairs(tmp_path / "x.jsonl"))
    chosen, rejected, _ = scores(moved(model), source.batch(0), 0, False)
    dpo = Dpo(beta=0.5)
    torch.testing.assert_close(dpo.margins(chosen, rejected), -dpo.margins(rejected, chosen))
    ahead, behind = dpo.losses(chosen, rejected), dpo.losses(rejected, chosen)
    torch.testing.assert_close(ahead - behind, -dpo.margins(chosen, rejected))  # log σ(m) − log σ(−m) = m


def test_log_probs_are_sums_over_the_answer_and_its_end(tmp_path):
    model, source = source_of(Dpo, base(tmp_path / "base"), pairs(tmp_path / "x.jsonl"))
    batch, tokenizer = source.batch(0), model.vocabulary.tokenizer
    chosen, rejected, _ = scores(moved(model), batch, 0, False)
    for row in range(4):
        text = tokenizer.decode(batch.tokens[row][batch.layout.real[row]])
        for one, answer in ((chosen, " It is blue."), (rejected, " red, no")):
            prompt = tokenizer.prompt(text.removesuffix(" It is blue."))
            ids = [*prompt, *tokenizer.prompt(answer), 0]
            logits = model(torch.tensor([ids]))[0].log_softmax(-1)
            want = sum(logits[i - 1, ids[i]] for i in range(len(prompt), len(ids)))
            assert one.policy[row].item() == pytest.approx(want.item(), rel=1e-9)
            assert int(one.tokens[row]) == len(ids) - len(prompt)


@pytest.mark.parametrize("kind", PAIRED)
def test_pieces_add_up_to_the_whole(kind, tmp_path):
    model, source = source_of(kind, base(tmp_path / "base"), pairs(tmp_path / "x.jsonl"))
    batch, objective = source.batch(0), kind()
    moved(model)
    whole = objective(model, batch, 7, True)
    some = [objective(model, piece, 7, True) for piece in batch.pieces(3)]
    total = some[0].plus(some[1]).plus(some[2])
    assert total.num_labels == whole.num_labels == 4
    torch.testing.assert_close(total.sum, whole.sum, rtol=1e-9, atol=1e-12)


def test_a_piece_of_a_kto_batch_is_refused(tmp_path):
    model, source = source_of(Kto, base(tmp_path / "base"), judged(tmp_path / "x.jsonl"))
    with pytest.raises(UsageError, match="kto: compares the rows of a batch"):
        Trainer(model, Kto(), Plan(steps=1, micro_batches=2))
    loss = Kto(beta=0.3)(model, source.batch(0), 0, True)
    assert loss.mean().item() == pytest.approx(0.5, rel=1e-12)  # 1 − σ(0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "kto", "reward"])
def test_a_run_learns_to_prefer(name, tmp_path):
    path = (judged if name == "kto" else pairs)(tmp_path / "x.jsonl")
    run = dt.train(from_=base(tmp_path / "base"), chats=path, objective=name, out=tmp_path / "run", **RUN)
    assert run.history[-1].val_metrics["accuracy"] == 1.0
    assert (tmp_path / "run" / "reference.safetensors").is_file() == TUNING[name].needs_reference
    again = dt.train(from_=tmp_path / "base", chats=path, objective=name, out=tmp_path / "run", **RUN)
    assert again.held_out_loss == run.held_out_loss
    if name == "reward":
        assert dt.load(tmp_path / "run").spec.head == RewardModel.spec_for(dt.load(tmp_path / "base").spec).head
