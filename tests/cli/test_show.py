"""dovetail show: the figures as JSON, the view for people, and the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import main

KEYS = {
    "spec",
    "parameters",
    "active_parameters",
    "flops_per_token",
    "state_bytes",
    "state_values_per_token",
    "length",
    "dtype",
    "max_length",
    "tree",
}


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["show", *args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_has_exactly_these_keys(capsys: pytest.CaptureFixture[str]) -> None:
    data = shown(capsys, "llama-3-70b", "--length", "4096")
    assert set(data) == KEYS
    assert (data["spec"], data["length"], data["dtype"]) == ("llama-3-70b", 4096, "bf16")
    assert data["parameters"] == data["active_parameters"] == 70_553_706_496
    assert data["state_bytes"] == 1_342_177_280  # 2 · 80 layers · 8 heads · 128 · 4096 tokens · 2 bytes
    assert data["state_values_per_token"] == 2 * 80 * 8 * 128
    matmul = 2 * (70_553_706_496 - 128256 * 8192 - 161 * 8192)  # all but the embedding's table and the norms
    assert data["flops_per_token"] == {
        "matmul": matmul,
        "attention": 80 * 4 * 8192 * 4096,
        "attention_causal": 80 * 4 * 8192 * 4097 // 2,
    }


def test_a_window_bounds_what_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    at = [shown(capsys, "mistral-7b", "--length", str(n)) for n in (4096, 65536)]
    assert at[0]["state_bytes"] == at[1]["state_bytes"] == 2 * 32 * 8 * 128 * 4096 * 2
    assert at[0]["state_values_per_token"] == at[1]["state_values_per_token"] == 2 * 32 * 8 * 128


def test_dtype_scales_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [shown(capsys, "gpt2", "--dtype", dtype)["state_bytes"] for dtype in ("fp8", "bf16", "fp32")]
    assert sizes == [2 * 12 * 768 * 1024 * width for width in (1, 2, 4)]


@pytest.mark.parametrize(("name", "length"), [("llama-tiny", 2048), ("gpt2", 1024), ("bert-base", 512), ("vit-base", 197)])
def test_the_usual_length_is_what_the_model_takes(capsys: pytest.CaptureFixture[str], name: str, length: int) -> None:
    assert shown(capsys, name)["length"] == length


def test_tree_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    data = shown(capsys, "t5-tiny")

    def numbers(node: dict[str, Any]) -> int:
        own = 0
        for shape in node["shapes"].values():
            size = 1
            for dim in shape:
                size *= dim
            own += size
        total = own + sum(map(numbers, node["children"]))
        assert node["parameters"] == total
        return total

    assert numbers(data["tree"]) == data["parameters"]
    children = {child["path"]: child for child in data["tree"]["children"]}
    assert children["embed"]["shapes"] == {"table": [512, 72]}
    assert children["head"]["same_as"] == {"out.weight": "embed.table"}


def test_set_and_swap_change_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown(capsys, "llama-tiny")
    one = shown(
        capsys, "llama-tiny", "--set", "layers.*.mixer.kv_heads=1", "--set", "head.tied=false", "--swap", "norm=layernorm"
    )
    assert plain["state_bytes"] == 2 * one["state_bytes"]
    shifts, table, halved = 13 * 256, 512 * 256, 6 * 2 * 32 * 256
    assert one["parameters"] == plain["parameters"] + shifts + table - halved


def test_a_file_and_a_directory_are_specs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "width: 28\nvocab: 62\nlayers: [{mixer: {heads: 6, head: 12}, ffn: {hidden: 44}}]\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dovetail.yaml").write_text(text)
    by_file, by_folder = (shown(capsys, str(tmp_path / name)) for name in ("mine.yaml", "model"))
    assert by_file["parameters"] == by_folder["parameters"] == 62 * 28 + 4 * 72 * 28 + 3 * 44 * 28 + 3 * 28
    assert by_file["spec"] == str(tmp_path / "mine.yaml")


def test_the_view_folds_layers_and_gives_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gemma-2-2b", "--length", "8192")
    assert code == 0
    for words in (
        "2,614,341,888",
        "layers 0, 2 … 24 ×13",
        "layers 1, 3 … 25 ×13",
        "window(size 4096)",
        "out.weight = embed.table",
    ):
        assert words in out
    assert out.count("gelu_tanh") == 2
    assert "advice" in out
    assert "a head of 256 is outside the usual 32 to 128" in out
    code, out, _ = run(capsys, "llama-3-405b")
    assert code == 0
    assert "layers 0–125 ×126" in out
    assert "advice" not in out


def test_a_model_that_does_not_decode_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "bert-tiny")["state_bytes"] == 0
    assert "cannot decode token by token" in run(capsys, "bert-tiny")[1]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["no-such-model"], 4, "no such file, directory or preset"),
        (["llama-tiny", "--length", "0"], 2, "--length: 0 is not from 1 to 16,777,216"),
        (["llama-tiny", "--set", "layers.*.mixer.kv_heads=3"], 3, "layers.0.mixer.kv_heads: 3 does not divide 8 heads"),
        (["llama-tiny", "--set", "layers.*.mixer.kv=3"], 3, "no field of layers.*.mixer matches 'kv' (did you mean kv_heads?)"),
        (["llama-tiny", "--swap", "norm=rope"], 3, "rope is a position, not a norm"),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str) -> None:
    found, out, err = run(capsys, *args)
    assert (found, out) == (code, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["show", "parts", "diff"])
def test_help_does_not_import_torch(verb: str) -> None:
    code = (
        "import sys; from dovetail.cli import main\n"
        f"try: main(['{verb}', '--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "usage: dovetail" in made.stdout


def test_a_swap_says_what_it_could_not_carry_over(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "llama-3-8b", "--swap", "mixer=mla")
    assert "not carried over  layers.*.mixer.kv_heads was 8; mla has no such field" in out
    assert out.count("not carried over") == 1
    assert "heads 32" in out
