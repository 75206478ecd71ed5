"""Ranks of a run: what they exchange in a step, and what ends them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_jobs import flagged_step, tagged, translated

from dovetail.parallel.layout import Axes
from dovetail.parallel.pair import Pair

SPEC = "width: 28\nvocab: 270\nlayers:\n- mixer: {heads: 2, head: 14}\n  ffn: {hidden: 44}\n"


@pytest.mark.slow
def test_a_step_adds_up_loss_tokens_and_flags_in_one_collective(pair: Pair) -> None:
    first, second = pair.run(flagged_step)
    tokens, flags, collectives, loss = first
    assert first == second
    assert tokens == 2 * 8 + 2 * 5
    assert flags == (False, True, False)
    assert collectives == 1
    assert math.isfinite(loss)


def ranks_of(launcher: int) -> list[int]:
    return list(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(home: Path, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run on two ranks that has trained some steps, and the ids of its ranks."""
    (home / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    (home / "spec.yaml").write_text(SPEC)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["-m", "dovetail", "train", "spec.yaml", "--text=tale.txt", "--steps=100000", "--batch=4", "--length=16", "-o=run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (home / "errors").open("w") as errors:
        child = subprocess.Popen([*torchrun, *train, *flags], cwd=home, stderr=errors, stdout=errors, env=env, text=True)
    losses, until = home / "run" / "loss.jsonl", time.monotonic() + 200
    while not (losses.exists() and losses.read_text().count("\n") > 3):
        assert child.poll() is None, (home / "errors").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    return child, ranks_of(child.pid)


def seconds_until_ended(processes: list[int], most: float = 90) -> float:
    begin = time.monotonic()
    while any(map(alive, processes)):
        if time.monotonic() - begin > most:
            for process in filter(alive, processes):
                os.kill(process, signal.SIGKILL)
            pytest.fail(f"a rank was alive after {most} s")
        time.sleep(0.1)
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}], ids=["fsdp", "tensor"])
def test_e2_ranks_decode_at_evals_as_one_does(tmp_path: Path, pair: Pair, axes: Axes) -> None:
    pairs, words = tmp_path / "pairs.jsonl", [f"{a}{b}" for a in "abc" for b in "abc"] * 8
    pairs.write_text("".join(json.dumps({"source": word, "target": word[::-1]}) + "\n" for word in words))
    layer = "{mixer: {heads: 2, head: 12}, cross: {kind: cross_attention, heads: 2, head: 12}, ffn: {hidden: 44}}"
    encoder = "{width: 24, vocab: 8, layers: [{mixer: {heads: 2, head: 12, mask: full}, ffn: {hidden: 40}}], head: null}"
    spec = f"width: 28\nvocab: 8\nencoder: {encoder}\nlayers: [{layer}]"
    alone = translated(spec, str(pairs), {}, 48)
    assert 0 < alone["exact_match"] < 1
    for found in pair.run(translated, spec, str(pairs), axes, 48):
        assert found == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}], ids=["fsdp", "tensor"])
def test_e4_ranks_score_entities_as_one_does(tmp_path: Path, pair: Pair, axes: Axes) -> None:
    rows = [{"tokens": ["met", name, "in", place], "tags": ["O", "B-PER", "O", "B-LOC"]} for name in "abcd" for place in "efgh"]
    tags = tmp_path / "tags.jsonl"
    tags.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    layer = "{mixer: {heads: 2, head: 12, mask: full, position: none}, ffn: {hidden: 44}}"
    spec = f"width: 28\nvocab: 16\nlayers: [{layer}]\nhead: {{kind: token_classifier, classes: 3}}"
    alone = tagged(spec, str(tags), {}, 1)
    assert 0 < alone["f1"] < 1
    for found in pair.run(tagged, spec, str(tags), axes, 1):
        assert found == pytest.approx(alone, abs=1e-9)


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    launcher, ranks = started(tmp_path)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    seconds_until_ended(ranks, 30)
    assert "the launcher of this rank has ended" in (tmp_path / "errors").read_text()


@pytest.mark.slow
def test_a_stopped_rank_ends_all_ranks_with_their_stacks(tmp_path: Path) -> None:
    launcher, ranks = started(tmp_path, "--timeout=6")
    os.kill(ranks[1], signal.SIGSTOP)
    assert seconds_until_ended(ranks) > 5
    assert launcher.wait(60) != 0
    errors = (tmp_path / "errors").read_text()
    assert re.search(
        rf"rank 1 \({re.escape(socket.gethostname())}, process {ranks[1]}\) did not arrive, last seen at step \d+", errors
    )
    assert "does not respond: it is stopped" in errors
    assert "within 6 s (--timeout)" in errors
    assert "Fatal Python error: Aborted" in errors  # the stacks of the rank that was stopped
    assert "Timed out waiting" in errors
    assert errors.count("in _end_with_launcher") >= 2
