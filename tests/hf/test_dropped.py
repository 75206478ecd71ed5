"""Tensors of a checkpoint that are not imported are reported by pattern, number and bytes; an unknown tensor is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dovetail
from dovetail.base.errors import FileError
from dovetail.cli import main
from dovetail.files.model_dir import WEIGHTS_FILE, save
from dovetail.hf.hf import export_tensors, import_tensors
from dovetail.hf.load import load_reporting
from dovetail.hf.tensors import Dropped, DroppedTensors
from dovetail.hf.write import export_directory, import_directory
from dovetail.model.construction import build
from dovetail.proof.laws.ported import in_family

# buffers of older files: the pattern of their names, the reason, two names
EXTRA = {
    "bart": ("*coder.version", "an older file format", ["model.encoder.version", "model.decoder.version"]),
    "qwen3_moe": (
        "*.rotary_emb.inv_freq",
        "rotary frequencies",
        ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"],
    ),
}


def checkpoint(family: str, home: Path) -> Path:
    """A tiny checkpoint in Hugging Face layout, as older files of its family are: with buffers."""
    spec = in_family(family)
    save(build(spec), spec, home / "ours")
    place = home / "theirs"
    export_directory(home / "ours", place, family)
    (place / "dovetail.yaml").unlink()
    stored = load_file(place / WEIGHTS_FILE)
    stored |= {name: torch.ones(3, 5) for name in EXTRA[family][2]}
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("family", EXTRA)
def test_tensors_that_are_not_imported_are_reported(family: str, tmp_path: Path) -> None:
    place, (pattern, reason, names) = checkpoint(family, tmp_path), EXTRA[family]
    with pytest.warns(DroppedTensors, match=r"2 tensors, 120 bytes, not imported") as caught:
        dovetail.load(place)
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{pattern}: ")
    (dropped,) = load_reporting(place).dropped
    assert (dropped.pattern, dropped.tensors, dropped.bytes) == (pattern, 2, 120)
    assert reason in dropped.reason
    assert import_directory(place, tmp_path / "again").dropped == [dropped]
    export_directory(tmp_path / "again", tmp_path / "back")
    back = load_file(tmp_path / "back" / WEIGHTS_FILE)
    assert load_file(place / WEIGHTS_FILE).keys() - back.keys() == set(names)


@pytest.mark.parametrize("family", EXTRA)
def test_the_command_reports_them(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, pattern = checkpoint(family, tmp_path), EXTRA[family][0]
    for more, code in (([], 0), (["--json", "--force"], 0)):
        with pytest.raises(SystemExit) as end:
            main(["import", str(place), "-o", str(tmp_path / "out"), *more])
        assert end.value.code == code
        shown = capsys.readouterr().out
        if more:
            assert json.loads(shown)["dropped"][0]["pattern"] == pattern
        else:
            assert f"{pattern}: 2 tensors, 120 bytes, not imported" in shown
    with pytest.raises(SystemExit):
        main(["export", str(place), "-o", str(tmp_path / "other")])
    assert f"{pattern}: 2 tensors, 120 bytes, not imported" in capsys.readouterr().err


def test_a_layer_too_many_that_predicts_nothing_is_an_error(tmp_path: Path) -> None:
    spec = in_family("deepseek_v3")
    save(build(spec), spec, tmp_path / "ours")
    export_directory(tmp_path / "ours", tmp_path / "theirs", "deepseek_v3")
    stored = load_file(tmp_path / "theirs" / WEIGHTS_FILE)
    name = f"model.layers.{len(spec.layers)}.mlp.gate.weight"
    save_file({**stored, name: torch.ones(3, 5)}, tmp_path / "theirs" / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(FileError, match=rf"{name}: has no place in this spec"):
        dovetail.load(tmp_path / "theirs")


def test_buffers_of_old_files_are_reported() -> None:
    spec = in_family("bert", "BertForMaskedLM")
    theirs = export_tensors(spec, {name: p.detach() for name, p in build(spec).named_parameters()}, "bert")
    old = {"bert.embeddings.position_ids": torch.arange(64), "bert.pooler.dense.bias": torch.ones(30)}
    with pytest.warns(DroppedTensors) as caught:
        import_tensors(spec, {**theirs, **old}, "bert")
    assert [str(one.message).partition(":")[0] for one in caught] == ["*embeddings.position_ids", "bert.pooler.*"]
    copy = {"cls.predictions.decoder.bias": theirs["cls.predictions.bias"].clone()}
    import_tensors(spec, {**theirs, **copy}, "bert")  # a second copy loses nothing
    with pytest.raises(FileError, match=r"cls\.predictions\.decoder\.bias: is tied to head\.bias, yet holds other numbers"):
        import_tensors(spec, {**theirs, "cls.predictions.decoder.bias": torch.ones(62)}, "bert")


def test_one_tensor_is_no_tensors() -> None:
    assert str(Dropped("a.*", "why", 1, 4)) == "a.*: 1 tensor, 4 bytes, not imported (why)"
