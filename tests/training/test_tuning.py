"""Supervised fine-tuning: answers alone are learned, packed examples are those alone, and a run resumes."""

from __future__ import annotations

import dataclasses as dc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tuning_base import base, chats, write_rows

import dovetail as dt
from dovetail.base.errors import FileError, UsageError
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.text.conversation import Encoded
from dovetail.training.objective import TuningData
from dovetail.training.source import BatchShape, HeldOut
from dovetail.training.tuning import Sft, labels_of, pack, packed_batch

RUN = {"objective": "sft", "options": {"template": "plain"}, "batch": 4, "length": 64, "quiet": True, "learning_rate": 1e-3}


def read(directory: Path, path: Path, length: int = 64, batch: int = 4, **options: object):
    model = dt.load(directory)
    assert model.vocabulary is not None
    data = TuningData(model.vocabulary, str(directory), {"template": "plain", **options})
    return model, Sft.read(path, model.spec, BatchShape(batch, length, 0), lambda _: None, data)


def test_labels_are_the_next_tokens_of_answers():
    one = Encoded(np.array([5, 6, 7, 8, 9]), np.array([False, False, True, True, False]))
    assert labels_of(one).tolist() == [IGNORED, 7, 8, IGNORED, IGNORED]


def test_packed_examples_have_the_loss_of_each_alone(tmp_path):
    model, source = read(base(tmp_path / "base"), chats(tmp_path / "chats.jsonl"))
    model = model.double()
    batch, sft = source.batch(0), Sft()
    assert max(batch.layout.documents) > 1, "several examples in a row"
    whole = sft(model, batch, 0, False)
    alone: list[LossSum] = []
    for row, documents in enumerate(batch.layout.documents):
        for document in range(documents):
            real = batch.layout.seg[row] == document
            one = Encoded(
                batch.tokens[row][real].numpy(), np.append([False], (batch.labels[row][real] != IGNORED)[:-1].numpy())
            )
            tokens, labels, layout = packed_batch([[one]], 64)
            alone.append(sft(model, dc.replace(batch, tokens=tokens, labels=labels, layout=layout), 0, False))
    assert sum(one.num_labels for one in alone) == whole.num_labels
    torch.testing.assert_close(sum(one.sum for one in alone), whole.sum, rtol=1e-9, atol=0)


def test_every_row_is_in_one_pack_and_none_is_too_long():
    lengths = np.random.default_rng(0).integers(3, 60, 200).tolist()
    packs = pack(lengths, 64)
    assert sorted(i for one in packs for i in one) == list(range(200))
    sizes = [sum(lengths[i] for i in one) for one in packs]
    assert max(sizes) <= 64
    assert len(packs) <= 1.2 * sum(lengths) / 64 + 1
    assert [len(one) for one in pack([5] * 8, 64, least=4)] == [2, 2, 2, 2]


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path):
    path = chats(tmp_path / "chats.jsonl", 20)
    long = {"prompt": "say", "completion": " yes" * 200}
    path.write_text(f"{json.dumps(long)}\n{path.read_text()}")
    model = dt.load(base(tmp_path / "base"))
    notes: list[str] = []
    data = TuningData(model.vocabulary, "base", {"template": "plain"})
    source = Sft.read(path, model.spec, BatchShape(2, 64, 0), notes.append, data)
    assert "1 of 21 rows are longer than 64 tokens and left out, the first is" in notes[0]
    assert notes[0].endswith("chats.jsonl:1")
    assert source.table.count < 20
    with pytest.raises(FileError, match="20 of 20 rows are longer than 8 tokens; give a larger --length"):
        Sft.read(chats(path, 20), model.spec, BatchShape(2, 8, 0), notes.append, data)


def test_a_run_learns_answers_and_writes_template_and_end_tokens(tmp_path):
    rows = write_rows(tmp_path / "x.jsonl", [{"prompt": f"What is {i}?", "completion": " It is blue."} for i in range(40)])
    run = dt.train(
        from_=base(tmp_path / "base"),
        chats=rows,
        steps=60,
        out=tmp_path / "run",
        **{**RUN, "options": {}, "learning_rate": 1e-2},
    )
    assert run.history[0].val_loss is None
    assert run.held_out_loss < 0.2 < run.history[0].loss
    model = dt.load(tmp_path / "run")
    assert model.generate("What is 7?") == " It is blue."  # it ends
    assert model.vocabulary.stop == {0}


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    place, rows = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    whole = dt.train(from_=place, chats=rows, steps=6, out=tmp_path / "whole", **RUN)
    batches = HeldOut.__getitem__

    def killed(self: HeldOut, i: int) -> object:
        if (tmp_path / "cut/checkpoints").is_dir() and len((tmp_path / "cut/loss.jsonl").read_text().splitlines()) >= 3:
            raise KeyboardInterrupt
        return batches(self, i)

    monkeypatch.setattr(HeldOut, "__getitem__", killed)
    often = {"checkpoint_minutes": 1e-9, "evals": 6}
    with pytest.raises(KeyboardInterrupt):
        dt.train(from_=place, chats=rows, steps=6, out=tmp_path / "cut", **often, **RUN)
    monkeypatch.undo()
    again = dt.train(from_=place, chats=rows, steps=6, out=tmp_path / "cut", **often, **RUN)
    assert [one.loss for one in again.history] == [one.loss for one in whole.history]
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (tmp_path / "cut" / "chat_template.jinja").read_text().startswith("{% for message")


def test_settings_are_those_of_the_objective(tmp_path):
    place, rows = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    with pytest.raises(UsageError, match=r"--beta: sft has no such setting; settings: template"):
        dt.train(from_=place, chats=rows, steps=1, **{**RUN, "options": {"template": "plain", "beta": 0.1}})
    with pytest.raises(UsageError, match="name the one to tune by: sft"):
        dt.train(from_=place, chats=rows, steps=1, **{**RUN, "objective": None})
    with pytest.raises(FileError, match="has no chat template"):
        dt.train(from_=place, chats=rows, steps=1, **{**RUN, "options": {}})
    with pytest.raises(FileError, match="did you mean plain"):
        dt.train(from_=place, chats=rows, steps=1, **{**RUN, "options": {"template": "plane"}})
    with pytest.raises(UsageError, match="sft tunes a model"):
        dt.train("llama-tiny", chats=rows, steps=1, **RUN)


def test_epochs_are_passes_over_the_rows(tmp_path):
    place, rows = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    run = dt.train(from_=place, chats=rows, epochs=2, **RUN)
    _, source = read(place, rows)
    assert run.history[-1].step == 2 * source.epoch
    taken = [row for step in range(source.epoch) for row in source.batch(step).tokens.tolist()]
    assert len(taken) == len({tuple(row) for row in taken})
