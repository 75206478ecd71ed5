"""dt.train(from_=…): a run that starts from the weights and the tokenizer of a model directory or of another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, UsageError
from dovetail.cli import main
from dovetail.disk.yaml import parse_yaml
from dovetail.training.ranks import JobRanks

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "evals": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trained model, `first`, and two texts."""
    place = tmp_path_factory.mktemp("from")
    (place / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    (place / "other.txt").write_text("It was the age of wisdom, it was the age of foolishness.\n" * 40, encoding="utf-8")
    dt.train(SPEC, place / "tale.txt", steps=3, out=place / "first", ema=0.5, **SMALL)
    return place


def start_of(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights that runs start from, as they are set."""
    seen: list[dict[str, torch.Tensor]] = []
    whole = JobRanks.set_weights

    def recorded(self: JobRanks, model: dt.Transformer, weights: Any) -> None:
        whole(self, model, weights)
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    monkeypatch.setattr(JobRanks, "set_weights", recorded)
    return seen


def test_a_run_starts_from_weights_spec_and_tokenizer_of_a_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = start_of(monkeypatch)
    run = dt.train(None, home / "other.txt", from_=home / "first", steps=2, out=home / "second", **SMALL)
    before = dt.load(home / "first")
    assert run.model.spec == before.spec
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in seen[0].items())
    assert (home / "second" / "tokenizer.json").read_bytes() == (home / "first" / "tokenizer.json").read_bytes()
    written = parse_yaml((home / "second" / "run.yaml").read_text(), "run")
    assert written["from"] == str(home / "first")
    assert "tokenizer" not in written
    again = dt.train(home / "second" / "run.yaml", out=home / "again", quiet=True)
    assert [m.loss for m in again.history] == [m.loss for m in run.history], "the run file repeats it"


def test_the_newest_checkpoint_of_a_run_is_taken(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = start_of(monkeypatch)
    shutil.copytree(home / "first", tmp_path / "killed")
    (tmp_path / "killed" / "model.safetensors").unlink()
    dt.train(None, home / "tale.txt", from_=tmp_path / "killed", steps=1, **SMALL)
    before = dt.load(home / "first").state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in seen[0].items()), "the moving average, as it is saved"


def test_weights_of_hugging_face_layout_and_their_files_are_taken(home: Path, tmp_path: Path) -> None:
    dt.export(home / "first", tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    one, two = (
        dt.train(None, home / "tale.txt", from_=place, steps=2, out=tmp_path / "out" if place.name == "hf" else None, **SMALL)
        for place in (home / "first", tmp_path / "hf")
    )
    assert [m.loss for m in one.history] == [m.loss for m in two.history]
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


def test_a_spec_that_does_not_fit_is_refused_by_name(home: Path) -> None:
    with pytest.raises(FileError, match=r"has layers.0.ffn.*shape \[44, 28\]; the spec says \[48, 28\]; `dovetail graft"):
        dt.train(None, home / "tale.txt", from_=home / "first", set=["layers.*.ffn.hidden=48"], steps=1, **SMALL)
    with pytest.raises(FileError, match=r"first: has no layers.0.mixer_norm.shift"):
        dt.train(None, home / "tale.txt", from_=home / "first", swap=["norm=layernorm"], steps=1, **SMALL)
    run = dt.train(None, home / "tale.txt", from_=home / "first", set=["layers.*.mixer.dropout=0.2"], steps=1, **SMALL)
    assert run.model.spec.layers[0].mixer.dropout == 0.2  # type: ignore[attr-defined]


def test_data_of_another_tokenizer_is_refused(home: Path, tmp_path: Path) -> None:
    lines = (f'{{"text": "{i}: it was the best of times, it was the worst of times"}}\n' for i in range(40))
    (tmp_path / "tale.jsonl").write_text("".join(lines))
    dt.build_data(tmp_path / "tale.jsonl", tmp_path / "bytes", quiet=True, held_out=0.5)
    with pytest.raises(FileError, match=r"its tokenizer is not that of .*; build the data with tokenizer"):
        dt.train(None, data=str(tmp_path / "bytes"), from_=home / "first", steps=1, **SMALL)


def test_weights_that_changed_are_another_run(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "first", tmp_path / "base")
    dt.train(None, home / "tale.txt", from_=tmp_path / "base", steps=1, out=tmp_path / "out", **SMALL)
    dt.train(None, home / "tale.txt", from_=home / "first", steps=1, out=tmp_path / "base", force=True, **SMALL)
    with pytest.raises(FileError, match=r"holds another run: recorded.from.sha256 is"):
        dt.train(None, home / "tale.txt", from_=tmp_path / "base", steps=1, out=tmp_path / "out", **SMALL)


def test_without_spec_and_weights_there_is_nothing_to_train(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="give a spec, or initial weights with from_"):
        dt.train(text=home / "tale.txt", steps=1)
    with pytest.raises(SystemExit) as end:
        main(["train", "--from", str(home / "first"), "--text", str(home / "tale.txt"), "--steps=1", "--batch=4", "--length=16",
              "--sample=0", "-o", str(home / "third")])  # fmt: skip
    assert end.value.code == 0
    assert f"{home / 'first'}: " in capsys.readouterr().err
