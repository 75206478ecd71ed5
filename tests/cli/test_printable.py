"""No control character from outside reaches the terminal: names of files and tensors, YAML keys, templates, generated text."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file

from dovetail.base.errors import printable
from dovetail.cli import main
from dovetail.cli.output import SafeConsole, print_error, print_line, print_text
from dovetail.files.model_dir import WEIGHTS_FILE, save
from dovetail.files.spec import SPEC_FILE, from_yaml, to_yaml
from dovetail.model.construction import build
from dovetail.text.learn import learn

EVIL = "x\x1b[2K\x1b]0;own\x07\r\x9b1Adovetail: all is well\u202e\u2066"
SPEC = from_yaml("{dovetail: 1, width: 28, vocab: 270, layers: [{mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]}")
TEXT = "It was the best of times.\n" * 40


def controls(text: str) -> set[str]:
    """Characters of the text that could steer a terminal."""
    return {c for c in text if unicodedata.category(c).startswith(("C", "Zl", "Zp"))} - {"\n"}


def evil_directory(place: Path) -> Path:
    directory = place / EVIL.replace("/", "")
    directory.mkdir()
    return directory


def bad_tensor(place: Path) -> list[str]:
    save(build(SPEC), SPEC, place / "model")
    weights = place / "model" / WEIGHTS_FILE
    save_file({**load_file(weights), EVIL: torch.zeros(1)}, weights)
    return ["export", "model", "-o", "out"]


def bad_key(place: Path) -> list[str]:
    (place / "spec.yaml").write_text(f"width: 28\n{json.dumps(EVIL)}: 3\n", encoding="utf-8")
    return ["show", "spec.yaml"]


def bad_template(place: Path) -> list[str]:
    save(build(SPEC), SPEC, place / "model", {"tokenizer.json": learn(TEXT, 270).to_json()})
    (place / "model" / "chat_template.jinja").write_text("{{ raise_exception(" + json.dumps(EVIL) + ") }}")
    return ["generate", "model", "hello", "--chat"]


def bad_directory(place: Path) -> list[str]:
    return ["show", str(evil_directory(place))]


def bad_result(place: Path) -> list[str]:
    directory = evil_directory(place)
    save(build(SPEC), SPEC, directory)
    return ["export", str(directory), "-o", str(directory) + "-hf"]


def bad_view(place: Path) -> list[str]:
    directory = evil_directory(place)
    (directory / SPEC_FILE).write_text(to_yaml(SPEC))
    return ["diff", str(directory), "llama-tiny"]


@pytest.mark.parametrize(
    ("make", "code"),
    [(bad_tensor, 4), (bad_key, 3), (bad_template, 4), (bad_directory, 4), (bad_result, 0), (bad_view, 0)],
)
def test_a_name_with_control_characters_is_printed_as_escapes(
    make, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = make(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert r"\x1b[2K" in out + err
    assert not controls(out + err)
    assert len(err.splitlines()) <= 1


def test_lines_and_generated_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"a\tb\n{EVIL}\udc80")
    print_text("naïve\n\t👩\u200d🚀 می\u200cروم \x1b[31m\r")
    print_error(f"one\ntwo {EVIL}")
    out, err = capsys.readouterr()
    assert out.startswith(f"a\tb\n{printable(EVIL)}\\udc80\nnaïve\n\t👩\u200d🚀 می\u200cروم \\x1b[31m\\r")
    assert err == f"dovetail: one\\ntwo {printable(EVIL)}\n"


def test_rich_keeps_its_own_controls_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    table.add_row(Text(EVIL, "bold red"), "next")
    console = SafeConsole(width=120, force_terminal=True, color_system="truecolor", highlight=False)
    console.print(table, Text(EVIL, "green"), style="dim")
    out = capsys.readouterr().out
    assert "\x1b[" in out  # colors
    for sequence in ("\x1b[2K", "\x1b]0;", "\x9b", "\r", "\u202e"):
        assert sequence not in out
    assert out.count(r"\x1b[2K") == 2
    assert "next" in out
