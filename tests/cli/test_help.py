"""The help of every verb: placeholders instead of Python types, no empty defaults, lines no longer than the terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail import __version__
from dovetail.base.dtypes import dtype_name
from dovetail.base.errors import SpecError
from dovetail.cli import VERBS, main
from dovetail.cli.command import command_of


def help_of(verb: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_wraps_and_names_no_python_type(
    verb: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(verb, columns, monkeypatch, capsys)
    assert not re.search(r"\bSTR\b|\bINT\b|\bFLOAT\b|\{None\}|default: None|default: False", text)
    prose = [line for line in text.splitlines() if not line.startswith("    ")]  # examples stay on one line
    assert max(map(len, prose)) <= columns


def test_dtypes_have_torch_names_and_short_ones() -> None:
    assert [dtype_name(name) for name in ("bf16", "bfloat16", "torch.float32", "FP16")] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "float16",
    ]
    with pytest.raises(SpecError, match="is not a dtype"):
        dtype_name("int3")


def test_completion_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=(dovetail {}); COMP_CWORD={}; _dovetail; echo "${{COMPREPLY[@]}}"'
    asked = (
        ("sh", 1, "show"),
        ("show llama-t", 2, "llama-tiny"),
        ("train --learn", 2, "--learning-rate"),
        ("data sh", 2, "show"),
    )
    for line, index, word in (*asked, ("data sh", 2, "show")):
        code = f"{script}\n{ask.format(line, index)}"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == [word]


ASKED = (("sh", "show"), ("show llama-t", "llama-tiny"), ("train --learn", "--learning-rate"))


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "word"), ASKED)
def test_completion_in_fish(line: str, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    (tmp_path / "dovetail.fish").write_text(capsys.readouterr().out)
    asked = f"source {tmp_path}/dovetail.fish; complete -C 'dovetail {line}'"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert [given.split("\t")[0] for given in done.stdout.splitlines()] == [word]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(("line", "word"), ASKED)
def test_completion_in_zsh(line: str, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "zsh"])
    words = line.split()
    # what the function offers, before zsh keeps those that begin with the word
    asked = f"compdef() {{ :; }}; compadd() {{ print -l -- $@; }}; _files() {{ :; }}\n{capsys.readouterr().out}\n"
    asked += f"words=(dovetail {line}); CURRENT={len(words) + 1}; _dovetail"
    done = subprocess.run(["zsh", "-f", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert [given for given in done.stdout.split() if given.startswith(words[-1])] == [word]


def test_completion_names_every_verb_in_every_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        with pytest.raises(SystemExit):
            main(["completion", shell])
        script = capsys.readouterr().out
        assert all(word in script for verb in VERBS for word in verb.split())


def test_the_doctor_names_versions_and_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert report["dovetail"] == __version__
    assert {package["name"] for package in report["packages"]} >= {"torch", "tokenizers", "rich"}
    assert report["memory"]["available_bytes"] > 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json(verb: str) -> None:
    assert "json" in command_of(verb).options
