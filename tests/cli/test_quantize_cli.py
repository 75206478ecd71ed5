"""`dovetail quantize` as a user calls it, on a model trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.cli import main
from dovetail.ops.formats.kinds import Int4
from dovetail.weights.quantization.recipe import recipe_of

SMALL = [
    "--set=width=32", "--set=vocab=290", "--set=layers.*.mixer.heads=2", "--set=layers.*.mixer.kv_heads=2",
    "--set=layers.*.ffn.hidden=48", "--sample=0", "--batch=4", "--length=16",
]  # fmt: skip
TEXT = "It was the best of times, it was the worst of times — it was the age of wisdom.\n" * 40
CALIBRATION = ["--samples=12", "--length=16"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a model that was trained on it for a moment."""
    home = tmp_path_factory.mktemp("home")
    (home / "tale.txt").write_text(TEXT, encoding="utf-8")
    args = ["--text", str(home / "tale.txt"), "-o", str(home / "model"), "--steps=30", "--learning-rate=1e-2", *SMALL]
    assert run("train", "llama-tiny", *args) == 0
    return home


def run(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return end.value.code


def test_size_perplexity_and_speed_and_a_directory_that_every_verb_opens(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--text", str(home / "tale.txt"), *CALIBRATION]
    assert (
        run("quantize", str(home / "model"), "--bits=4", "--method=gptq", *text, "-o", str(tmp_path / "small"), "--json") == 0
    )
    data: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["format"] == {"kind": "int4", "group": 16, "zero_point": False}
    assert (data["method"], data["leaves"]) == ("gptq", 7 * 6)
    assert data["after"]["bytes"] < data["before"]["bytes"]
    assert data["before"]["perplexity"] < data["after"]["perplexity"] * 1.5 < 290
    assert data["after"]["tokens_per_second"] > 0
    model = dt.load(tmp_path / "small")
    assert set(recipe_of(model).values()) == {Int4(group=16)}
    assert run("generate", str(tmp_path / "small"), "It was", "--max-tokens=4") == 0
    assert run("show", str(tmp_path / "small")) == 0
    assert run("quantize", str(tmp_path / "small"), "-o", str(tmp_path / "again")) == 3
    assert "is quantized already (start from the dense model)" in capsys.readouterr().err


def test_the_table_and_the_default_method(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("quantize", str(home / "model"), "--format=fp8", "-o", str(tmp_path / "small")) == 0
    printed = capsys.readouterr().out
    assert "42 matrices as fp8 (per channel) by rtn" in printed
    assert all(word in printed for word in ("weights", "perplexity", "tokens/s", "before", "after"))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--method=gptq"], 2, "--method gptq: needs calibration text; give --text"),
        (["--group=7"], 3, "32 inputs are not a multiple of the group of 7"),
        (["--format=fp8", "--group=16"], 2, "--group 16: fp8 has no groups"),
        (["--skip=*.mixer.x"], 3, "no leaf of this model matches"),
    ],
)
def test_refusals(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert run("quantize", str(home / "model"), *args, "-o", str(tmp_path / "small")) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_a6_contradictory_formats_are_refused(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--bits 8 --format nf4` ignored the bits; an adapter directory lost its adapter."""
    for options in (["--bits=8", "--format=nf4"], ["--bits=4", "--format=int8"]):
        assert run("quantize", str(home / "model"), *options, "-o", str(tmp_path / "x")) == 2
        assert "the bits are those of --format; give one of the two" in capsys.readouterr().err
    with pytest.raises(dt.DovetailError, match="group 8: the format has groups of 16"):
        dt.quantize(home / "model", format={"kind": "int4", "group": 16}, group=8)
    model = dt.load(home / "model")
    dt.attach(model, "lora")
    dt.save_adapter(model, tmp_path / "adapter", base=home / "model")
    assert run("quantize", str(tmp_path / "adapter"), "-o", str(tmp_path / "x")) == 4
    assert "is an adapter directory, without a model of its own; merge it first" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "x").exists()
