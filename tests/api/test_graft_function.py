"""dt.graft: a built model or a directory, a new spec or changes, losses on a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 3, mixer: {heads: 2, kv_heads: 2}, ffn: {hidden: 44}}]}"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40


def test_a_built_model_is_grafted_in_memory() -> None:
    model = dt.build(SPEC)
    result = dt.graft(model, set={"layers.*.mixer.kv_heads": 1}, layers="0,0,2")
    assert isinstance(result.model, dt.Transformer)
    assert len(result.model.spec.layers) == 3
    assert result.diff.summary["transformed"] > 0
    assert result.directory is None
    assert "kv_heads 2 → 1" in str(result)
    same = dt.graft(model, result.model.spec, layers=[0, 0, 2])
    assert same.to_dict()["tensors"] == result.to_dict()["tensors"]
    json.dumps(result.to_dict())


@pytest.mark.slow
def test_losses_on_a_text_and_a_directory(tmp_path: Path) -> None:
    text = tmp_path / "tale.txt"
    text.write_text(TEXT, encoding="utf-8")
    sizes = {"batch": 4, "length": 16, "quiet": True}
    dt.train(SPEC, text, steps=8, learning_rate=1e-2, sample=0, out=tmp_path / "model", **sizes)
    result = dt.graft(
        tmp_path / "model", set=["layers.*.mixer.kv_heads=1"], text=text, heal=0.01, out=tmp_path / "out", **sizes
    )
    assert set(result.loss) == {"before", "after", "healed"}
    assert len(result.history) == result.to_dict()["healing"]["steps"]
    assert not result.interrupted
    model = dt.load(tmp_path / "out")
    assert model.tokenizer is not None
    assert not dt.verify(model, result.model, decode=False, longest=0).failed
    assert "loss on the held-out text" in str(result)


def test_what_cannot_be_done_is_refused() -> None:
    model = dt.build(SPEC)
    with pytest.raises(UsageError, match="no change is given"):
        dt.graft(model)
    with pytest.raises(UsageError, match="hf=True: needs a model directory"):
        dt.graft(model, layers="0", hf=True)
    with pytest.raises(UsageError, match="heal: needs a text"):
        dt.graft(model, layers="0", heal=1)
    with pytest.raises(SpecError, match="cannot be carried over"):
        dt.graft(model, set={"width": 32})
