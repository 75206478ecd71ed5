"""`dovetail train --task`: the loss is of the answers, the metrics are accuracy and exact match; the run is an ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.data.tasks.task import read_synthetic_task
from dovetail.files.spec import from_yaml
from dovetail.nn.loss import IGNORED
from dovetail.training.answers import HELD_OUT_ROWS, Answers, from_task
from dovetail.training.loop import measure
from dovetail.training.source import BatchShape

SPEC = """
width: 24
vocab: 3
init: fan_in
layers: [{repeat: 2, mixer: {heads: 2}, ffn: {hidden: 32}}]
head: {kind: lm, tied: false}
"""
OPTIONS: dict[str, Any] = {"batch": 16, "length": 12, "steps": 4, "evals": 2, "quiet": True}


def test_the_metrics_are_those_of_greedy_decoding() -> None:
    model, task = dt.build(from_yaml(SPEC), seed=6), read_synthetic_task("{kind: sorting, items: 2}")
    batch = task.batch(1, 64, 6, 3)
    found = measure(model, [batch], Answers())
    rows, prompt = batch.tokens[:, :5], 5
    for _ in range(2):
        layout = dt.TokenLayout.whole(64, rows.shape[1])
        rows = torch.cat([rows, model(rows, dt.Ctx(layout=layout))[:, -1:].argmax(-1)], 1)
    exact = (rows[:, prompt:] == batch.labels[:, -2:]).all(1).double().mean().item()
    assert 0 < exact < 1
    assert found["exact_match"] == pytest.approx(exact)
    logits = model(batch.tokens, dt.Ctx(layout=batch.layout))
    due = batch.labels != IGNORED
    assert int(due.sum()) == 128
    assert found["accuracy"] == pytest.approx((logits.argmax(-1)[due] == batch.labels[due]).double().mean().item())
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits[due], batch.labels[due]).item(), rel=1e-5)


def test_steps_seeds_and_held_out_rows() -> None:
    task, spec = read_synthetic_task("parity"), from_yaml(SPEC)
    source, other, half = (
        from_task(task, spec, BatchShape(8, 12, seed, *rank)) for seed, rank in ((0, ()), (1, ()), (0, (1, 2)))
    )
    assert torch.equal(source.batch(3).tokens, source.batch(3).tokens)
    assert not torch.equal(source.batch(3).tokens, source.batch(4).tokens)
    assert not torch.equal(source.batch(3).tokens, other.batch(3).tokens)
    assert torch.equal(half.batch(3).tokens, source.batch(3).some_rows(BatchShape(8, 12, 0, 1, 2).rows()).tokens)
    assert sum(len(batch.tokens) for batch in source.held_out) == HELD_OUT_ROWS
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(source.held_out, other.held_out, strict=True))


def test_a_run_is_described_by_its_run_file_and_resumed(tmp_path: Path) -> None:
    task = {"kind": "modular_sum", "modulus": 3}
    run = dt.train(from_yaml(SPEC), task=task, out=tmp_path / "run", **OPTIONS)
    report = run.to_dict()
    assert 0 <= report["held_out_exact_match"] <= report["held_out_accuracy"] <= 1
    assert run.tokenizer is None
    again = dt.train(str(tmp_path / "run" / "run.yaml"), out=tmp_path / "copy", quiet=True)
    assert [at.loss for at in again.history] == [at.loss for at in run.history]
    resumed = dt.train(from_yaml(SPEC), task=task, out=tmp_path / "run", **OPTIONS)
    assert [at.val_loss for at in resumed.history] == [at.val_loss for at in run.history]
    with pytest.raises(FileError, match="task"):
        dt.train(from_yaml(SPEC), task="parity", out=tmp_path / "run", **OPTIONS)
    assert dt.load(tmp_path / "run").spec == run.model.spec


def test_what_does_not_fit_is_refused() -> None:
    spec = from_yaml(SPEC)
    long: dict[str, Any] = {**OPTIONS, "length": 32}
    with pytest.raises(SpecError, match=r"vocab: 3; the task mqar needs at least 17 .set vocab=17"):
        dt.train(spec, task="mqar", **long)
    with pytest.raises(SpecError, match=r"length: 12; the task mqar needs at least 24 .length 24"):
        dt.train(spec.set("vocab", 40), task="mqar", **OPTIONS)
    with pytest.raises(UsageError, match="one of them, not text and task"):
        dt.train(spec, "plays.txt", task="parity", **OPTIONS)
    with pytest.raises(SpecError, match="visible to a bidirectional model"):
        dt.train(spec.set("layers.*.mixer.mask", "full"), task="parity", **OPTIONS)
    with pytest.raises(UsageError, match="objective: next_token is trained on text, not on task; give text"):
        dt.train(spec, task="parity", objective="next_token", **OPTIONS)


@pytest.mark.slow
def test_attention_learns_a_task() -> None:
    spec = from_yaml(SPEC).set("vocab", 16).set("width", 32)
    options: dict[str, Any] = {**OPTIONS, "batch": 32, "steps": 300, "learning_rate": 6e-3}
    run = dt.train(spec, task="{kind: mqar, pairs: 2}", **options)
    assert run.to_dict()["held_out_exact_match"] > 0.9
