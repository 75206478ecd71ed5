"""`dovetail graft` as a user calls it, on a model trained here: losses, healing, both layouts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli import main
from dovetail.hf.load import load
from dovetail.hf.write import KEPT_CONFIG, export_directory, import_directory
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.views.bar import loss_bar, sparkline

SIZES = ["--batch=4", "--length=16"]
SMALL = [
    "--set=width=28", "--set=vocab=290", "--set=layers.*.mixer.heads=2", "--set=layers.*.mixer.kv_heads=2",
    "--set=layers.*.ffn.hidden=44", "--sample=0", *SIZES,
]  # fmt: skip
TEXT = "It was the best of times, it was the worst of times — it was the age of wisdom.\n" * 40
GROUPED = "--set=layers.*.mixer.kv_heads=1"
WINDOW = "--set=layers.*.mixer.mask=[causal, {kind: window, size: 5, keep: 2}]"


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


def graft(home: Path, out: Path, *args: str, text: bool = True) -> int | str | None:
    where = ["--text", str(home / "tale.txt"), *SIZES] if text else []
    return run("graft", str(home / "model"), *args, *where, "-o", str(out))


def last_loss(home: Path) -> float:
    return json.loads((home / "model" / "loss.jsonl").read_text().splitlines()[-1])["val_loss"]


def test_losses_before_after_and_healed(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert graft(home, tmp_path / "out", GROUPED, "--layers=0-2,2,5", "--heal=0.02", "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    loss = told["loss"]
    assert loss["before"] == last_loss(home), "the held-out text is the one of the training"
    assert loss["healed"] < loss["after"] != loss["before"]
    assert told["healing"]["held_out"][-1] == loss["healed"]
    assert told["healing"]["steps"] > 0
    assert told["change"][0] == {"path": "layers", "a": [0, 1, 2, 3, 4, 5], "b": [0, 1, 2, 2, 5]}
    assert told["parameters"]["after"] < told["parameters"]["before"]
    made = load(tmp_path / "out")
    assert [block.mixer.kv_heads for block in made.part.layers] == [1] * 5  # type: ignore[attr-defined]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert len((tmp_path / "out" / "loss.jsonl").read_text().splitlines()) == told["healing"]["steps"]


def test_without_healing_the_loss_of_what_is_written_is_the_loss_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert graft(home, tmp_path / "one", WINDOW) == 0
    shown = capsys.readouterr().out
    assert "loss on the held-out text" in shown
    assert "reinterpreted" in shown
    assert f"written to {tmp_path / 'one'}" in shown
    after = next(line for line in shown.splitlines() if line.split()[:1] == ["after"]).split()[1]
    assert run("graft", str(tmp_path / "one"), "--set=vocab=290", "--text", str(home / "tale.txt"), *SIZES, "--json") == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert f"{loss['before']:.3f}" == f"{loss['after']:.3f}" == after
    assert (tmp_path / "one-grafted" / "dovetail.yaml").is_file()


def test_a_large_model_needs_no_text(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert graft(home, tmp_path / "out", GROUPED, text=False) == 0
    assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "family"),
    [
        (GROUPED, "llama"),
        ("--set=layers.*.mixer.position.scaling={kind: yarn, factor: 4, original: 16}", "llama"),
        ("--set=layers.*.mixer.mask=[causal, {kind: window, size: 5}]", "mistral"),
        ("--layers=0,0,5", "llama"),
        ("--set=vocab=311", "llama"),
        ("--set=head.tied=false", "llama"),
    ],
)
def test_what_is_exported_gives_transformers_the_same_logits(home: Path, tmp_path: Path, change: str, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert graft(home, tmp_path / "hf", change, "--hf", text=False) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == family
    ours = load(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens = torch.randint(0, ours.part.vocab, (2, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, Ctx(layout=TokenLayout.whole(2, 29))), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_a_model_that_came_from_elsewhere_goes_back_there(home: Path, tmp_path: Path) -> None:
    """Its family is tried first, what a spec does not say is kept; a change it has no word for goes to another family."""
    export_directory(home / "model", tmp_path / "theirs")
    import_directory(tmp_path / "theirs", tmp_path / "ours")
    assert run("graft", str(tmp_path / "ours"), "--set=vocab=300", "-o", str(tmp_path / "own")) == 0
    assert (tmp_path / "own" / KEPT_CONFIG).is_file()
    mask = "--set=layers.*.mixer.mask=[causal, {kind: window, size: 5}]"
    assert run("graft", str(tmp_path / "theirs"), mask, "--hf", "-o", str(tmp_path / "windowed")) == 0
    assert json.loads((tmp_path / "windowed" / "config.json").read_text())["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([WINDOW, "--hf"], 3, "layers.0.mixer.mask"),
        (["--set=layers.3.ffn.hidden=48"], 3, "layers.3.ffn.gate.weight: cannot be carried over: ffn 44 → 48"),
        (["--set=width=36"], 3, "embed 28 → 36"),
        (["--set=vocab=12"], 3, "the text has token"),
        (["--layers=0-9"], 3, "there is no layer 9"),
        (["--set=layers.*.mixer.kv_heads=3"], 3, "layers.0.mixer.kv_heads"),
        ([], 2, "no change is given"),
        ([GROUPED, "--heal=0"], 2, "--heal: 0 is not above 0"),
        ([GROUPED, "--family=llama"], 2, "--family: needs --hf"),
    ],
)
def test_what_is_refused_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    assert graft(home, tmp_path / "out", *args) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_healing_needs_a_text(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert graft(home, tmp_path / "out", GROUPED, "--heal=1", text=False) == 2
    assert "give --text" in capsys.readouterr().err


def test_a_model_is_not_overwritten_unasked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert graft(home, home / "model", GROUPED, text=False) == 4
    assert "holds files that are not the model's: checkpoints/" in capsys.readouterr().err
    assert run("export", str(home / "model"), "-o", str(home / "theirs")) == 0
    assert run("export", str(home / "model"), "-o", str(home / "theirs")) == 4
    assert "--force" in capsys.readouterr().err


def test_bars_and_lines() -> None:
    assert (loss_bar(1.0), loss_bar(0.5), loss_bar(1 / 64)) == ("█" * 32, "█" * 16, "▌")
    assert loss_bar(float("nan")) == "█" * 32
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
