"""A run that was stopped, killed or damaged ends with the weights of the unbroken run."""

import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.base.termination import Interrupt

SPEC = """
width: 28
vocab: 270
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12, dropout: 0.1}
  ffn: {hidden: 44}
"""
SIZES: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "learning_rate": 1e-2}


@pytest.fixture
def tale(tmp_path: Path) -> Path:
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    return tmp_path / "tale.txt"


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def state(out: Path) -> str:
    """The checksum of weights, moving average and optimizer in the last checkpoint."""
    last = sorted((out / "checkpoints").iterdir())[-1]
    return hashlib.sha256((last / "rank-00000.safetensors").read_bytes()).hexdigest()


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "loss.jsonl").read_text().splitlines()]


def stop_after(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Ctrl-C after these many steps of the run, one resume after the other."""
    left, count = list(calls), [0]

    def pressed(self: Interrupt) -> bool:
        count[0] += 1
        if left and count[0] == left[0]:
            left.pop(0)
            count[0] = 0
            self.received = True
        return self.received

    monkeypatch.setattr(Interrupt, "__call__", pressed)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"optimizer": "muon", "ema": 0.9, "micro_batches": 2, "precision": "bf16"}])
def test_an_interrupted_run_ends_as_the_unbroken_one(tale: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    whole = dt.train(SPEC, tale, steps=20, out=tale.parent / "whole", **SIZES, **more)
    stop_after(monkeypatch, 3, 7, 6)
    out = tale.parent / "broken"
    for steps in (3, 10, 16):
        part = dt.train(SPEC, tale, steps=20, out=out, **SIZES, **more)
        assert part.interrupted
        assert len(part.history) == steps
    last = dt.train(SPEC, tale, steps=20, out=out, **SIZES, **more)
    assert not last.interrupted
    assert [m.loss for m in last.history] == [m.loss for m in whole.history]
    assert losses(out) == losses(tale.parent / "whole")
    assert digest(out) == digest(tale.parent / "whole")
    assert state(out) == state(tale.parent / "whole")
    if "ema" in more:  # what is saved is the average, and training goes on with the weights
        assert digest(out) != state(out)


def test_a_complete_run_is_reported_again(tale: Path) -> None:
    out = tale.parent / "out"
    first = dt.train(SPEC, tale, steps=5, out=out, **SIZES)
    before = digest(out)
    again = dt.train(SPEC, tale, steps=5, out=out, **SIZES)
    assert [m.loss for m in again.history] == [m.loss for m in first.history]
    assert digest(out) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 4}, "seed is 0 in run.yaml, and 4 here"),
        ({"steps": 6}, "steps is 5"),
        ({"schedule": "wsd"}, "schedule is cosine"),
    ],
)
def test_other_settings_are_refused(tale: Path, change: dict[str, Any], says: str) -> None:
    out = tale.parent / "out"
    dt.train(SPEC, tale, steps=5, out=out, **SIZES)
    with pytest.raises(FileError, match=f"holds another run: {says}"):
        dt.train(SPEC, tale, **{"steps": 5, "out": out, **SIZES, **change})
    tale.write_text(tale.read_text() + "Another line.\n")
    with pytest.raises(FileError, match=r"holds another run: recorded.data.sha256 is"):
        dt.train(SPEC, tale, steps=5, out=out, **SIZES)


def test_force_begins_anew(tale: Path) -> None:
    out = tale.parent / "out"
    dt.train(SPEC, tale, steps=5, out=out, **SIZES)
    before = digest(out)
    run = dt.train(SPEC, tale, steps=3, seed=1, out=out, force=True, **SIZES)
    assert len(run.history) == 3
    assert digest(out) != before
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]


def test_force_begins_anew_where_a_picture_was_being_written(tale: Path) -> None:
    """A temporary file of a killed writer counted as somebody's file, and then the checkpoints did, too."""
    out = tale.parent / "out"
    dt.train(SPEC, tale, steps=3, out=out, **SIZES)
    (out / ".loss.png.99999999-0123abcd.tmp").write_bytes(b"half a picture")
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(FileError, match=r"holds files that are not the model's: thesis\.txt; move them"):
        dt.train(SPEC, tale, steps=2, out=out, force=True, **SIZES)
    assert (out / "checkpoints" / "step-00000003").is_dir()
    (out / "thesis.txt").unlink()
    dt.train(SPEC, tale, steps=2, out=out, force=True, **SIZES)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)


@pytest.mark.filterwarnings("ignore:.*this checkpoint is not used")
def test_a_damaged_last_checkpoint_is_taken_again(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tale.parent / "out"
    stop_after(monkeypatch, 4)
    dt.train(SPEC, tale, steps=8, out=out, **SIZES)
    dt.train(SPEC, tale, steps=8, out=out, **SIZES)
    weights, optimizer = digest(out), state(out)
    flip_a_bit(out / "checkpoints" / "step-00000008" / "rank-00000.safetensors")
    dt.train(SPEC, tale, steps=8, out=out, **SIZES)
    assert (digest(out), state(out)) == (weights, optimizer)


def test_a_damaged_checkpoint_is_passed_over(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dt.train(SPEC, tale, steps=12, out=tale.parent / "whole", **SIZES)
    out = tale.parent / "out"
    stop_after(monkeypatch, 4, 4)
    dt.train(SPEC, tale, steps=12, out=out, **SIZES)
    dt.train(SPEC, tale, steps=12, out=out, **SIZES)
    flip_a_bit(out / "checkpoints" / "step-00000008" / "rank-00000.safetensors")
    with pytest.warns(UserWarning, match="is damaged.*this checkpoint is not used"):
        dt.train(SPEC, tale, steps=12, out=out, **SIZES)
    assert digest(out) == digest(tale.parent / "whole")


def test_one_process_trains_in_a_directory(tale: Path) -> None:
    out = tale.parent / "out"
    dt.train(SPEC, tale, steps=2, out=out, **SIZES)
    handle = os.open(out / "run.yaml", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(FileError, match="another process trains in this directory"):
        dt.train(SPEC, tale, steps=2, out=out, **SIZES)
    os.close(handle)


def killed(command: list[str], home: Path, after: float) -> bool:
    """Run a command and kill it after some seconds; return whether it had ended by itself."""
    with subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        try:
            assert child.wait(after) == 0
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            return False
    return True


@pytest.mark.slow
def test_kill_9_at_any_time_and_the_same_command_again(tale: Path) -> None:
    home = tale.parent
    (home / "spec.yaml").write_text(SPEC)
    flags = ["--text=tale.txt", "--steps=400", "--batch=4", "--length=16", "--sample=0", "--checkpoint-minutes=0.003"]
    command = [sys.executable, "-m", "dovetail", "train", "spec.yaml", *flags]
    start = time.monotonic()
    assert killed([*command, "-o", "whole"], home, 300)
    length = time.monotonic() - start
    generator, kills = random.Random(7), 0
    while not killed([*command, "-o", "broken"], home, generator.uniform(0.3, 1.0) * length):
        kills += 1
        assert kills < 30
    assert kills > 0
    assert digest(home / "broken") == digest(home / "whole")
    assert losses(home / "broken") == losses(home / "whole")


@pytest.mark.filterwarnings("ignore:.*this checkpoint is not used")
def test_the_model_is_that_of_the_step_that_the_run_reached(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tale.parent / "out"
    stop_after(monkeypatch, 4, 4, 2)
    dt.train(SPEC, tale, steps=12, out=out, **SIZES)
    weights = digest(out)
    dt.train(SPEC, tale, steps=12, out=out, **SIZES)
    flip_a_bit(out / "checkpoints" / "step-00000008" / "rank-00000.safetensors")
    again = dt.train(SPEC, tale, steps=12, out=out, **SIZES)  # from step 4, and interrupted before step 8
    assert len(again.history) == 6
    saved = dt.load(out).state_dict()
    assert all(tensor.equal(again.model.state_dict()[name]) for name, tensor in saved.items())
    assert digest(out) != weights
