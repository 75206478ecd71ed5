"""Adapters through `dt.tune`, and on a base whose weights have fewer bits (QLoRA)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tuning_base import base, chats

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.training.source import HeldOut
from dovetail.weights.adapters.storage import adapter_tensors
from dovetail.weights.quantization.recipe import quantized_leaves

IDS = torch.arange(9)[None]


def test_tune_trains_an_adapter_on_chats(tmp_path: Path) -> None:
    start, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    run = dt.tune(
        start,
        data,
        adapter={"kind": "lora", "rank": 4},
        template="plain",
        steps=12,
        length=64,
        out=tmp_path / "run",
        quiet=True,
    )
    assert run.history[-1].loss < run.history[0].loss - 0.05
    assert not (tmp_path / "run" / "model.safetensors").exists(), "the base is not copied"
    assert torch.equal(dt.load(tmp_path / "run")(IDS), run.model.eval()(IDS))


def test_an_adapter_is_trained_on_weights_of_four_bits(tmp_path: Path) -> None:
    start, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    dt.quantize(start, bits=4, out=tmp_path / "four", speed=False)
    run = dt.tune(
        tmp_path / "four",
        data,
        adapter={"kind": "lora", "rank": 4},
        template="plain",
        steps=12,
        length=64,
        out=tmp_path / "run",
        quiet=True,
    )
    leaves = dict(quantized_leaves(run.model))
    assert leaves
    assert all(leaf.leaf.adapter is not None for leaf in leaves.values())
    assert run.history[-1].loss < run.history[0].loss - 0.05
    before, after = dict(quantized_leaves(dt.load(tmp_path / "four"))), leaves
    for path, leaf in before.items():
        assert all(torch.equal(tensor, after[path].stored()[name]) for name, tensor in leaf.stored().items())
    opened = dt.load(tmp_path / "run")
    torch.testing.assert_close(opened(IDS).float(), run.model.eval()(IDS), atol=0.05, rtol=0.05)
    assert not torch.allclose(dt.load(tmp_path / "four")(IDS).float(), run.model(IDS), atol=0.05)


def test_an_adapter_is_not_merged_into_weights_of_four_bits(tmp_path: Path) -> None:
    start, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    dt.quantize(start, bits=4, out=tmp_path / "four", speed=False)
    dt.tune(tmp_path / "four", data, adapter="lora", template="plain", steps=2, length=64, out=tmp_path / "run", quiet=True)
    with pytest.raises(SpecError, match="fewer bits"):
        dt.merge(tmp_path / "four", tmp_path / "run", out=tmp_path / "merged")


def test_a_killed_run_with_dropout_resumes_to_the_same_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    how = {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.4}, "template": "plain", "steps": 4, "evals": 4, "length": 64}
    whole = dt.tune(start, data, out=tmp_path / "whole", quiet=True, **how)
    batches = HeldOut.__getitem__

    def killed(self: HeldOut, i: int) -> object:
        if len((tmp_path / "cut" / "loss.jsonl").read_text().splitlines()) >= 2:
            raise KeyboardInterrupt
        return batches(self, i)

    monkeypatch.setattr(HeldOut, "__getitem__", killed)
    monkeypatch.setattr("dovetail.api.train.CHECKPOINT_MINUTES", 1e-9)
    with pytest.raises(KeyboardInterrupt):
        dt.tune(start, data, out=tmp_path / "cut", quiet=True, **how)
    monkeypatch.undo()
    again = dt.tune(start, data, out=tmp_path / "cut", quiet=True, **how)
    want = adapter_tensors(whole.model)
    assert want
    for path, tensor in adapter_tensors(again.model).items():
        assert torch.equal(tensor, want[path]), path
