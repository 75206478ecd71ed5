"""dt.train(adapter=…): an adapter is trained on a frozen base, resumed from its checkpoints, and opened with its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.base.termination import Interrupt
from dovetail.training.plan import Plan

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "evals": 1}
IDS = torch.arange(10)[None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trained model, `first`, and a text."""
    place = tmp_path_factory.mktemp("adapters")
    (place / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    dt.train(SPEC, place / "tale.txt", steps=3, out=place / "first", **SMALL)
    return place


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_an_adapter_is_trained_and_opened_with_its_base(home: Path, kind: str) -> None:
    out, notes = home / kind, list[str]()
    run = dt.train(None, home / "tale.txt", from_=home / "first", adapter=kind, steps=3, out=out, note=notes.append, **SMALL)
    assert any(note.startswith(f"{kind}: applied ") for note in notes)
    assert not (out / "model.safetensors").exists(), "the base is not copied"
    base = dt.load(home / "first")
    tensors = json.loads((sorted((out / "checkpoints").iterdir())[-1] / "manifest.json").read_text())["tensors"]
    assert tensors
    assert all(".adapter." in name for name in tensors), "a checkpoint holds the adapter and its optimizer alone"
    weights = dict(run.model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in base.named_parameters()), "the base has not changed"
    for opened in (dt.load(out), dt.load(home / "first", adapter=out)):
        assert torch.equal(opened(IDS), run.model.eval()(IDS))
    assert not torch.equal(base(IDS), run.model(IDS))
    assert dt.generate(out, "It was", max_tokens=2).tokens


def test_an_interrupted_run_ends_with_the_same_adapter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"from_": home / "first", "adapter": {"kind": "lora", "rank": 2}, "steps": 6, **SMALL}
    whole = dt.train(None, home / "tale.txt", out=home / "whole", **given)
    calls: list[int] = []

    def pressed(self: Interrupt) -> bool:
        calls.append(1)
        self.received = self.received or len(calls) == 3  # Ctrl-C in the third step
        return self.received

    monkeypatch.setattr(Interrupt, "__call__", pressed)
    part = dt.train(None, home / "tale.txt", out=home / "cut", **given)
    assert part.interrupted
    assert len(part.history) == 3
    monkeypatch.undo()
    again = dt.train(None, home / "tale.txt", out=home / "cut", **given)
    assert [m.loss for m in again.history] == [m.loss for m in whole.history]
    name = "adapter.safetensors"
    assert (home / "cut" / name).read_bytes() == (home / "whole" / name).read_bytes()


def test_the_learning_rate_is_ten_times_that_of_all_weights(home: Path) -> None:
    run = dt.train(
        None, home / "tale.txt", from_=home / "first", adapter="lora", steps=2, warmup=0.0, schedule="constant", **SMALL
    )
    assert run.history[-1].lr == pytest.approx(10 * Plan.learning_rate)


def test_another_base_is_refused_and_a_base_is_needed(home: Path) -> None:
    dt.train(None, home / "tale.txt", from_=home / "first", adapter="lora", steps=1, out=home / "one", **SMALL)
    dt.save(dt.build(SPEC, seed=5), home / "other")
    with pytest.raises(FileError, match=r"was trained on another base \(.*first\): its fingerprint is"):
        dt.load(home / "other", adapter=home / "one")
    with pytest.raises(UsageError, match="adapter: an adapter is trained on the weights of a model"):
        dt.train(SPEC, home / "tale.txt", adapter="lora", steps=1, **SMALL)
    with pytest.raises(SpecError, match="no part is called 'lorra'"):
        dt.train(None, home / "tale.txt", from_=home / "first", adapter="lorra", steps=1, **SMALL)


def test_a_model_with_an_adapter_is_not_saved_without_it(home: Path, tmp_path: Path) -> None:
    model = dt.load(home / "first")
    dt.attach(model, "lora")
    with pytest.raises(SpecError, match="has an adapter, which a model directory does not hold"):
        dt.save(model, tmp_path / "lost")
    dt.save_adapter(model, tmp_path / "kept")
    (tmp_path / "kept" / "adapter.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(FileError, match="is damaged, or not the file that"):
        dt.load(home / "first", adapter=tmp_path / "kept")
