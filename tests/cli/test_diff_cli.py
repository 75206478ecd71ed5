"""dovetail diff: statuses as JSON and as folded rows."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["diff", *args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "mistral-7b", "llama-3-8b", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert set(data) == {"tensors", "summary", "change"}
    assert data["summary"] == {
        "kept": 225,
        "reinterpreted": 64,
        "transformed": 2,
        "new": 0,
        "dropped": 0,
        "impossible": 0,
    }
    assert data["tensors"][0] == {
        "a": "embed.table",
        "b": "embed.table",
        "status": "transformed",
        "how": "vocab: 96256 rows added",
        "shapes": {"a": [32000, 4096], "b": [128256, 4096]},
    }
    assert data["change"][0] == {"path": "vocab", "a": 32000, "b": 128256}
    assert len(data["tensors"]) == 291


def test_the_view_folds_layers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llama-tiny", "gpt2-tiny")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["layers.0–3.mixer.q.weight", "×4"] in [line[:2] for line in lines]
    assert ["layers.4–5.mixer.q.weight", "×2"] in [line[:2] for line in lines]
    assert ["layers.*.ffn.gate.weight", "×6"] in [line[:2] for line in lines]
    assert "34 impossible   22 dropped   34 new   0 transformed" in out


def test_b_may_be_changed_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llama-tiny", "llama-tiny", "--swap", "position=alibi", "--set", "layers.2.mixer.kv_heads=1")
    assert code == 0
    assert "layers.2.mixer.k.weight" in out
    assert "kv_heads 2 → 1: the mean of every 2; reinterpreted: mixer.position: rope → alibi" in " ".join(out.split())
    assert "2 transformed   11 reinterpreted   43 kept" in out


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["llama-tiny", "nothing"], 4, "nothing: no such file, directory or preset"),
        (["llama-tiny", "llama-tiny", "--set", "width=255"], 3, "layers.0.mixer.heads: 8 does not divide the width, 255"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str) -> None:
    found, out, err = run(capsys, *args)
    assert (found, out) == (code, "")
    assert words in err
