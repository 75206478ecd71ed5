"""The chain of docs/tune.md, command by command from an empty folder: a base, SFT, DPO, merged, int4, exported, loaded by
transformers and by `dovetail generate`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tuning_base import chats, write_rows

import dovetail as dt
from dovetail.cli import main
from dovetail.ops.formats.kinds import Int4
from dovetail.weights.quantization.recipe import recipe_of

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers" / "tuning"
SPEC = """
width: 32
vocab: 300
layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1, head: 16}, ffn: {hidden: 64}}]
head: {kind: lm, tied: false}
"""
TOKENS = torch.arange(1, 25)[None]  # those of peers_compressed.py


def commands() -> list[list[str]]:
    """The commands of the page's section."""
    section = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8").partition("## From text to four bits")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines()]


def run(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run one command; return what it printed."""
    with pytest.raises(SystemExit) as stop:
        main(command[1:])
    printed = capsys.readouterr()
    assert not stop.value.code, (command, printed.err[-2000:])
    return printed.out


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eight commands and transformers: a minute alone, six under load
def test_every_command_of_the_chain_runs_and_the_logits_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(SPEC)
    Path("notes.txt").write_text("user: What is it? assistant: It is blue, red, green. say yes or no\n" * 120)
    chats(Path("chats.jsonl"))
    rows = [{"prompt": f"What is {i}?", "chosen": " It is blue.", "rejected": " It is red."} for i in range(40)]
    write_rows(Path("pairs.jsonl"), list(rows))
    printed = {command[1]: run(command, capsys) for command in commands()}
    assert set(printed) == {"train", "tune", "merge", "quantize", "export", "generate"}
    assert printed["generate"].strip()
    with torch.no_grad():
        adapted, merged = dt.load("preferred")(TOKENS), dt.load("merged")(TOKENS)
        four, small, theirs = dt.load("small"), dt.load("small")(TOKENS), dt.load("small-hf")(TOKENS)
    assert not Path("preferred", "model.safetensors").exists(), "an adapter alone"
    assert all(isinstance(format, Int4) for format in recipe_of(four).values())
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(small, merged), "four bits round"
    torch.testing.assert_close(theirs, small, rtol=1e-5, atol=1e-5)
    if not (PEERS / "ready").exists():
        pytest.skip("the last arrow needs transformers with compressed-tensors: bash benchmarks/peers/make tuning")
    script = ROOT / "tests" / "quantization" / "peers_compressed.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    subprocess.run([PEERS / "bin" / "python", script, "out.safetensors", "small-hf"], check=True, env=environment, timeout=1200)
    found = load_file("out.safetensors")["small-hf"].float()
    assert float((found - small).abs().max() / small.abs().max()) < 1e-5
