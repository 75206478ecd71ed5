"""A model directory with one NaN weight: every verb that computes with it or writes it names the weight and exits with 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.cli import main
from dovetail.cli.output import to_json
from dovetail.files.model_dir import WEIGHTS_FILE, save
from dovetail.files.spec import from_yaml
from dovetail.hf.write import export_directory
from dovetail.model.construction import build
from dovetail.text.learn import learn

SPEC = from_yaml("{dovetail: 1, width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]}")
TEXT = "It was the best of times, it was the worst of times.\n" * 40
WEIGHT, THEIRS = "layers.0.mixer.k.weight", "model.layers.0.self_attn.k_proj.weight"


def spoil(directory: Path, name: str) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    tensors[name][1, 2] = torch.nan
    save_file(tensors, directory / WEIGHTS_FILE)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(build(SPEC), SPEC, "model", {"tokenizer.json": learn(TEXT, 270).to_json()})
    export_directory("model", "model-hf")
    Path("tale.txt").write_text(TEXT, encoding="utf-8")
    spoil(Path("model"), WEIGHT)
    spoil(Path("model-hf"), THEIRS)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "code", "problem"),
    [
        (["generate", "model", "It was"], 4, f"{WEIGHT} holds nan; load finite weights"),
        (["generate", "model", "It was", "--temperature=1", "--json"], 4, f"{WEIGHT} holds nan; load finite weights"),
        (["map", "model", "It was", "--layer=0"], 4, f"{WEIGHT} holds nan; load finite weights"),
        (["map", "model", "It was", "--layer=1"], 4, f"{WEIGHT} holds nan; load finite weights"),
        (["export", "model", "-o", "out"], 4, f"out: {THEIRS} holds nan; nothing was written"),
        (["import", "model-hf", "-o", "out"], 4, f"out: {WEIGHT} holds nan; nothing was written"),
        (["graft", "model", "--set=layers.*.ffn.hidden=40", "-o", "out", "--redraw"], 4, f"out: {WEIGHT} holds nan"),
        (["graft", "model", "--set=vocab=280", "-o", "out", "--text=tale.txt", "--length=16", "--json"], 4, "holds nan"),
        (
            ["graft", "model", "--set=vocab=280", "-o", "out", "--text=tale.txt", "--length=16", "--heal=0.01"],
            5,
            f"step 1: the loss is nan, the gradient norm nan; {WEIGHT} holds nan",
        ),
    ],
)
def test_one_nan_weight_is_named(
    args: list[str], code: int, problem: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in home.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == code
    assert problem in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in home.iterdir()} == before


def test_json_is_standard_json() -> None:
    data = {"loss": float("nan"), "rows": [(1.5, float("-inf")), None, True, "é"]}
    assert json.loads(to_json(data)) == {"loss": "nan", "rows": [[1.5, "-inf"], None, True, "é"]}
    assert to_json(data).isascii()
