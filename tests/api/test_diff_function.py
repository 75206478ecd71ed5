"""dt.diff, dt.emit and dt.list_parts: the functions behind the verbs of these names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.files.spec import load_spec


def test_diff_takes_every_form_of_a_spec() -> None:
    spec = load_spec("llama-tiny")
    results = [dt.diff(spec, "llama-tiny", swap={"position": "alibi"}), dt.diff("llama-tiny", spec.swap("position", "alibi"))]
    assert results[0].to_dict() == results[1].to_dict()
    assert results[0].summary["reinterpreted"] == 12
    assert results[0].names == ("spec", "llama-tiny --swap position=alibi")
    json.dumps(results[0].to_dict())


def test_diff_prints_as_the_table_of_the_command_line() -> None:
    text = repr(dt.diff("llama-tiny", "llama-tiny", swap=["position=alibi"]))
    assert "layers.*.mixer.position" in text
    assert "12 reinterpreted" in text


def test_emit_returns_the_text_and_writes_it_on_request(tmp_path: Path) -> None:
    result = dt.emit("llama-tiny", set={"layers.*.mixer.kv_heads": 4})
    compile(result.text, "model.py", "exec")
    assert "kv_heads=4" in result.text
    assert str(result) == result.text
    assert result.out is None
    written = dt.emit("llama-tiny", out=tmp_path / "llama.py")
    assert (tmp_path / "llama.py").read_text() == written.text
    assert written.to_dict()["lines"] == written.lines == len(written.text.splitlines())
    with pytest.raises(FileError, match="exists already"):
        dt.emit("gpt2-tiny", out=tmp_path / "llama.py")
    assert dt.emit("gpt2-tiny", out=tmp_path / "llama.py", force=True).lines > 0


def test_list_parts_is_a_sequence_of_parts() -> None:
    every = dt.list_parts()
    masks = dt.list_parts("mask")
    assert 0 < len(masks) < len(every)
    assert {part.group for part in masks} == {"mask"}
    rope = next(part for part in every if part.kind == "rope")
    assert [field.name for field in rope.fields][:2] == ["base", "fraction"]
    assert "rope" in str(every)
    with pytest.raises(SpecError, match="'glue' is not a group of parts"):
        dt.list_parts("glue")
