"""`dovetail generate` as a user calls it: on a model trained here, in a chat, and where it cannot write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.files.model_dir import save
from dovetail.files.spec import SPEC_FILE
from dovetail.hf.load import load
from dovetail.text.learn import learn

SMALL = [
    "--set=width=28", "--set=vocab=290", "--set=layers.*.mixer.heads=2", "--set=layers.*.mixer.kv_heads=1",
    "--set=layers.*.ffn.hidden=44", "--batch=4", "--length=16", "--sample=0",
]  # fmt: skip
TEXT = "It was the best of times, it was the worst of times — it was the age of wisdom.\n" * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "tale.txt").write_text(TEXT, encoding="utf-8")
    args = ["--text", str(home / "tale.txt"), "-o", str(home / "model"), "--steps=90", "--learning-rate=1e-2", *SMALL]
    assert run("train", "llama-tiny", *args) == 0
    return home / "model"


def run(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return end.value.code


def test_a_model_trained_here_writes_what_it_learned(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("generate", str(trained), "It was the", "--max-tokens", "12") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("It was the ")
    assert shown.out.removeprefix("It was the ")[:8] in TEXT
    assert "12 tokens" in shown.err


def test_a_seed_gives_the_same_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    told = []
    for seed in ("4", "4", "5"):
        args = ["--temperature=1.5", "--top-p=0.98", "--top-k=200", f"--seed={seed}", "--max-tokens=20", "--json"]
        assert run("generate", str(trained), "It was", *args) == 0
        told.append(json.loads(capsys.readouterr().out)["tokens"])
    assert told[0] == told[1] != told[2]


def test_beams_find_a_text_that_is_at_least_as_probable(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("generate", str(trained), "It was the", "--max-tokens=8", "--beams=3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens"]) == 8
    assert run("generate", str(trained), "It was the", "--max-tokens=8", "--beams=1", "--json") == 0
    one = json.loads(capsys.readouterr().out)
    assert run("generate", str(trained), "It was the", "--max-tokens=8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one["tokens"]  # one beam is greedy
    assert run("generate", str(trained), "It", "--beams=3", "--temperature=1") == 3
    assert "beams" in capsys.readouterr().err


@pytest.mark.slow
def test_it_streams_while_it_writes(trained: Path) -> None:
    """The first bytes are there before the last token is: a slow reader sees them one by one."""
    command = [sys.executable, "-u", "-m", "dovetail.cli", "generate", str(trained), "It was", "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        first = child.stdout.read(len("It was"))
        assert child.poll() is None  # still writing
        rest = child.stdout.read()
    assert child.returncode == 0
    assert (first + rest).decode("utf-8").startswith("It was")


def test_a_chat_goes_through_the_template(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(trained)
    place = tmp_path / "chat"
    save(model, model.part, place, beside={"tokenizer.json": (trained / "tokenizer.json").read_text()})
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}It was{% endif %}"
    )
    (place / "chat_template.jinja").write_text(template)
    capsys.readouterr()
    assert run("generate", str(place), "Hello", "--chat", "--system", "Be brief", "--max-tokens=8", "--json") == 0
    chatted = json.loads(capsys.readouterr().out)
    text = "system: Be brief<|end|>user: Hello<|end|>It was"
    assert run("generate", str(place), text, "--max-tokens=8", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert chatted["tokens"] == plain["tokens"]
    assert chatted["prompt_tokens"] == plain["prompt_tokens"]
    assert run("generate", str(place), "Hello", "--chat", "--max-tokens=4") == 0
    assert not capsys.readouterr().out.startswith("Hello")  # an answer stands alone


@pytest.mark.parametrize(
    ("change", "args", "code", "said"),
    [
        (None, ["--max-tokens=0"], 2, "--max-tokens: 0 is not from 1 to"),
        (None, ["--temperature=-1"], 2, "--temperature: -1 is below 0"),
        (None, ["--top-p=2"], 2, "--top-p: 2 is not above 0"),
        (None, ["--chat"], 4, "has no chat template"),
        ("mask: causal -> full", [], 3, "layers: the model is not causal"),
        ("no tokenizer", [], 4, "has no tokenizer.json"),
        ("larger tokenizer", [], 3, "vocab: 290 is too small for token id"),
    ],
)
def test_errors_are_one_line(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str | None,
    args: list[str],
    code: int,
    said: str,
) -> None:
    model, place = load(trained), tmp_path / "model"
    save(model, model.part, place, beside={"tokenizer.json": (trained / "tokenizer.json").read_text()})
    if change == "no tokenizer":
        (place / "tokenizer.json").unlink()
    elif change == "larger tokenizer":
        (place / "tokenizer.json").write_text(learn("It was a dark and stormy night. " * 9 + TEXT, 400).to_json())
    elif change is not None:
        spec = model.part.set("layers.*.mixer.mask", "full")
        save(model, spec, place)
        assert (place / SPEC_FILE).is_file()
    capsys.readouterr()
    assert run("generate", str(place), "It was a stormy night, it was the age of wisdom", *args) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
