"""A model directory with files of a person or another tool is refused before any work, and nothing of it is deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.cli import main
from dovetail.data.corpus import Batch, Corpus
from dovetail.disk.model_files import MODEL_FILES, foreign
from dovetail.files.model_dir import check_replaceable, save
from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.hf.write import export_directory, import_directory
from dovetail.model.construction import build

SPEC = from_yaml("{width: 24, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, head: 12}, ffn: {hidden: 44}}]}")
REFUSED = r"model: holds files that are not the model's: eval/, notes.txt; move them, or choose another path"


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory with a person's notes and a sub-directory with results."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "model"
    save(build(SPEC), SPEC, directory)
    (directory / "notes.txt").write_text("learning rate 3e-4 was best")
    (directory / "eval").mkdir()
    (directory / "eval" / "scores.csv").write_text("1,2")
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    (tmp_path / "spec.yaml").write_text((directory / "dovetail.yaml").read_text())
    return directory


def files(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, with its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_python_functions_refuse_it(model_dir: Path, tmp_path: Path) -> None:
    before = files(model_dir)
    save(build(SPEC), SPEC, tmp_path / "other")
    export_directory(tmp_path / "other", tmp_path / "theirs")
    (tmp_path / "empty").mkdir()  # a source without a model: refused for the target before it is read
    attempts: list[Any] = [
        lambda: save(build(SPEC, seed=1), SPEC, model_dir),
        lambda: import_directory(tmp_path / "empty", model_dir),
        lambda: export_directory(tmp_path / "empty", model_dir),
        lambda: dt.train(SPEC, tmp_path / "tale.txt", steps=2, out=model_dir, quiet=True),
    ]
    for attempt in attempts:
        with pytest.raises(FileError, match=REFUSED):
            attempt()
        assert files(model_dir) == before


@pytest.mark.parametrize(
    "args",
    [
        ["train", "spec.yaml", "--text=tale.txt", "--steps=1"],
        ["import", "theirs"],
        ["export", "other"],
        ["graft", "other", "--set=layers.*.mixer.kv_heads=1"],
    ],
)
def test_commands_refuse_it_even_with_force(model_dir: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    before = files(model_dir)
    save(build(SPEC), SPEC, model_dir.with_name("other"))
    export_directory(model_dir.with_name("other"), model_dir.with_name("theirs"))
    with pytest.raises(SystemExit) as end:
        main([*args, "-o", "model", "--force"])
    assert end.value.code == 4
    assert REFUSED in capsys.readouterr().err
    assert files(model_dir) == before


def test_files_that_appear_during_training_are_kept(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, batch = model_dir.with_name("run"), Corpus.batch

    def batches_and_notes(corpus: Corpus, seed: int, step: int, rows: int, length: int) -> Batch:
        if step == 1:
            (out / "notes.txt").write_text("it trains")
            (out / "eval" / "step 1").mkdir(parents=True)
            (out / "eval" / "step 1" / "scores.csv").write_text("1,2")
            (out / "latest").symlink_to("nowhere")
            os.mkfifo(out / "pipe")
        return batch(corpus, seed, step, rows, length)

    monkeypatch.setattr(Corpus, "batch", batches_and_notes)
    sizes: dict[str, Any] = {"batch": 2, "length": 8, "sample": 0, "tokenizer": "characters"}
    run = dt.train(SPEC, model_dir.with_name("tale.txt"), steps=3, out=out, quiet=True, **sizes)
    assert (out / "notes.txt").read_text() == "it trains"
    assert (out / "eval" / "step 1" / "scores.csv").read_text() == "1,2"
    assert os.readlink(out / "latest") == "nowhere"
    assert (out / "pipe").is_fifo()
    assert torch.equal(load(out).get_parameter("embed.table"), run.model.get_parameter("embed.table"))


def test_a_file_that_the_writer_writes_again_is_its_own(tmp_path: Path) -> None:
    for text in ("old", "new"):
        save(build(SPEC), SPEC, tmp_path / "model", beside={"notes.txt": text})
    assert (tmp_path / "model" / "notes.txt").read_text() == "new"


def test_which_files_are_foreign(tmp_path: Path) -> None:
    for name in (*MODEL_FILES, "model-00001-of-00002.safetensors", "optimizer.pt", "model.safetensors.bak", "Dovetail.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.json").mkdir()
    assert foreign(tmp_path) == ["Dovetail.yaml", "model.safetensors.bak", "optimizer.pt", "tokenizer/", "vocab.json/"]


def test_what_a_killed_writer_left_does_not_block_the_next(tmp_path: Path) -> None:
    save(build(SPEC), SPEC, tmp_path / "model")
    left, others = (tmp_path / "model" / f".{name}.4415-1de4aa64.tmp" for name in ("loss.png", "notes.txt"))
    left.write_bytes(b"half a picture")
    check_replaceable(tmp_path / "model")
    assert not left.exists()
    others.write_text("half a note")
    with pytest.raises(FileError, match="holds files that are not the model's"):
        check_replaceable(tmp_path / "model")
    assert others.exists()
