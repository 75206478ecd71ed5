"""`dovetail emit`: a file, or stdout; never over somebody's file; a part without a writer is a spec error with its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli import main


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["emit", *args])
    return int(left.value.code or 0)


def test_the_text_goes_to_stdout_or_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-tiny") == 0
    text = capsys.readouterr().out
    compile(text, "llama_tiny.py", "exec")
    assert text.startswith('"""llama-tiny in plain PyTorch')
    file = tmp_path / "llama.py"
    assert run("llama-tiny", "-o", str(file)) == 0
    assert file.read_text() == text
    assert f"{len(text.splitlines())} lines" in capsys.readouterr().out


def test_a_file_that_is_there_is_kept_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    assert run("llama-tiny", "-o", str(file)) == 4
    assert file.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err
    assert run("llama-tiny", "-o", str(file), "--force") == 0
    assert "class Model" in file.read_text()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-tiny", "-o", str(tmp_path / "none" / "llama.py")) == 4
    assert "cannot be written" in capsys.readouterr().err


def test_settings_and_swaps_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-tiny", "--swap", "norm=layernorm", "--set", "layers.*.mixer.kv_heads=4") == 0
    text = capsys.readouterr().out
    assert "class LayerNorm" in text
    assert "kv_heads=4" in text


def test_a_part_without_a_writer_is_a_spec_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rwkv6-tiny") == 3
    assert "layers.0.mixer: rwkv6 has no writer yet" in capsys.readouterr().err
