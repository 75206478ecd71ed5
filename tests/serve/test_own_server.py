"""The laws of servers on `dovetail serve`, in processes of their own: prefix cache on, speculation on and off."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

pytest.importorskip("fastapi")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.\n"
LAYER = "mixer: {heads: 2, head: 16}, ffn: {hidden: 64}"
SPEC = f"{{width: 32, vocab: 300, layers: [{{repeat: 2, {LAYER}}}], mtp: [{{block: {{{LAYER}}}}}]}}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = learn(TEXT * 20, 300)
    model = dt.build(dt.from_yaml(SPEC).set("vocab", tokenizer.size), seed=1).train()
    windows = tokenizer.encode(TEXT * 6).unfold(0, 48, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(40):
        model.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.vocabulary = Vocabulary(tokenizer=tokenizer, stop=frozenset([tokenizer.id_of(END)]))
    dt.save(model.eval(), tmp_path_factory.mktemp("own") / "small")
    return tmp_path_factory.getbasetemp() / "own0" / "small"


@contextlib.contextmanager
def served(directory: Path, *flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "dovetail", "serve", str(directory), "--port=0", "--threads=1", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculate", "flags"),
    [
        ("lookup", ()),
        ("lookup", ("--cache=int8",)),
        ("lookup", ("--rows=3", "--pages=800", "--budget=24")),
        ("mtp", ()),
    ],
)
def test_every_law_of_servers_holds_with_prefix_cache_and_speculation(
    directory: Path, speculate: str, flags: tuple[str, ...]
) -> None:
    with served(directory, f"--speculate={speculate}", *flags) as url, served(directory, *flags) as plain:
        found = dt.laws(url, against=plain).to_dict()
    rows = {row["law"]: row for row in found["laws"]}
    assert len(rows) == 13
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(rows, "passed"), found
