"""`dovetail import`, `export`, `port` and `show` on a directory in Hugging Face layout, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.hf.dialect import DIALECTS
from dovetail.model.construction import build

SPEC = from_yaml("""
width: 24
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
""")


def run(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return end.value.code


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(build(SPEC), SPEC, tmp_path / "mine")
    return tmp_path


def test_out_and_in_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "mine", "-o", "theirs") == 0
    assert "written to theirs as llama (LlamaForCausalLM), 20 tensors" in capsys.readouterr().out
    assert run("show", "theirs", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert run("show", "mine", "--json") == 0
    config = {"spec": "theirs", "max_length": 2048}  # the config that export writes names a length
    assert {**json.loads(capsys.readouterr().out), **config} == shown
    (home / "theirs" / "dovetail.yaml").unlink()
    assert run("import", "theirs", "-o", "again", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"directory": "again", "parameters": 17_160, "layers": 2, "dropped": []}
    assert (home / "again" / "model.safetensors").read_bytes() == (home / "mine" / "model.safetensors").read_bytes()


def test_what_is_there_is_not_overwritten(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "mine", "-o", "theirs") == 0
    assert run("export", "mine", "-o", "theirs") == 4
    assert "theirs: exists already; choose another path with -o, or replace it with --force" in capsys.readouterr().err
    assert run("export", "mine", "-o", "theirs", "--force") == 0
    (home / "thesis").mkdir()
    (home / "thesis" / "text").write_text("ten years")
    assert run("export", "mine", "-o", "thesis", "--force") == 4
    assert (home / "thesis" / "text").read_text() == "ten years"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["export", "mine", "-o", "out", "--family", "gpt2"], 3, "cannot be written as gpt2"),
        (["export", "mine", "-o", "out", "--family", "grok"], 3, "no dialect is called 'grok'"),
        (["import", "nowhere", "-o", "out"], 4, "nowhere: no such directory"),
        (["show", "old.bin"], 4, "old.bin: is a pickle, which can run code when it is opened"),
        (["import", "empty", "-o", "out"], 4, "empty: holds neither config.json nor dovetail.yaml"),
    ],
)
def test_errors_are_one_line(home: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str) -> None:
    (home / "empty").mkdir()
    (home / "old.bin").write_bytes(b"")
    assert run(*args) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not (home / "out").exists()


def test_the_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("port", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model_type"] for row in rows] == list(DIALECTS)
    for row in rows:
        assert row["import"] is True
        assert row["export"] is True
        assert row["lines"] > 0
        assert row["transformers"].count(".") == 2
    assert run("port") == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert f"{len(DIALECTS)} families" in shown
