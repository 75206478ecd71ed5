"""dovetail data build and data show: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.api.show_data import show_data
from dovetail.base.errors import UsageError
from dovetail.cli import main
from dovetail.decoding.generation import Vocabulary
from dovetail.text.learn import learn


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dovetail.api.build_data.available_workers", lambda: 1)
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"line {i % 50}\n" for i in range(80)))
    return path


def test_build_and_show(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("data", "build", rows, "-o", out, "--lines", "--deduplicate", "--held-out", "0.2", "--json", "--quiet") == 0
    output = capsys.readouterr()
    data = json.loads(output.out)
    assert output.err == f"files 1, bytes {rows.stat().st_size}, units 1\n"
    assert data["dropped"] == {"duplicates": 30, "empty": 0}
    assert sum(split["documents"] for split in data["splits"].values()) == 50
    assert data["splits"]["train"]["shards"] == 1
    assert run("data", "show", out) == 0
    assert "30 duplicates" in capsys.readouterr().out
    assert run("data", "show", out, "--verify", "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == {**data, "problems": []}
    assert "verifying" in output.err


def test_a_damaged_file_is_named(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run("data", "build", rows, "-o", out, "--lines")
    path = out / "train-00000.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    capsys.readouterr()
    assert run("data", "show", out, "--verify", "--quiet") == 4
    printed = capsys.readouterr().out
    assert "3 of 4 files match" in printed or "1 of 2 files match" in printed
    assert "train-00000.bin: its SHA-256 is" in printed


def test_errors_are_one_line(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nnot json\n')
    for args, code, says in (
        (("build", bad, "-o", tmp_path / "out", "--quiet"), 4, "bad.jsonl:2: is not JSON"),
        (("build", tmp_path / "none*.txt", "-o", tmp_path / "out"), 4, "no such file, and no file matches it as a pattern"),
        (("build", rows, "-o", tmp_path / "out", "--held-out", "2"), 2, "2 is not from 0 to 0.999"),
        (("build", "-o", tmp_path / "out"), 2, "missing FILE|DIR|GLOB"),
        (("show", tmp_path), 4, "is not a corpus of token shards"),
    ):
        capsys.readouterr()
        assert run("data", *args) == code, says
        error = capsys.readouterr().err
        assert says in error
        assert "Traceback" not in error


def test_the_help_of_the_first_word_lists_the_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "--help") == 0
    assert [line.split("   ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "dovetail data build",
        "dovetail data show",
    ]


def test_show_prints_the_tokens_that_are_learned(tmp_path: Path) -> None:
    model = dt.build("width: 16\nvocab: 300\nlayers: [{mixer: {heads: 2, head: 8}, ffn: {hidden: 8}}]")
    model.vocabulary = Vocabulary(learn("user: hi assistant: yes no\n" * 20, 300))
    dt.save(model, tmp_path / "model")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n")
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps({'prompt': 'hi', 'chosen': ' yes', 'rejected': ' no'})}\n")
    assert run("data", "show", tmp_path / "chats.jsonl", "--model", tmp_path / "model", "--template", "plain", "--json") == 0
    shown = show_data(tmp_path / "chats.jsonl", model=tmp_path / "model", template="plain")
    assert "user:·hi↵assistant:⟦·yes<|end|>⟧" in str(shown)
    assert (shown.rows, shown.learned) == (1, sum(shown.shown[0].examples[0].answer))
    pairs = str(show_data(tmp_path / "pairs.jsonl", model=tmp_path / "model"))
    assert "pairs.jsonl:1 rejected\nhi⟦·no<|end|>⟧" in pairs
    with pytest.raises(UsageError, match="give the model that reads it with --model"):
        show_data(tmp_path / "chats.jsonl")
