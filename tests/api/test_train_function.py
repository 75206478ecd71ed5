"""dt.train: the model, its metrics and its directory; Ctrl-C keeps what there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.base.errors import UsageError

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40
SMALL = {"batch": 4, "length": 16, "sample": 4, "quiet": True}


@pytest.fixture
def tale(tmp_path: Path) -> Path:
    (tmp_path / "tale.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "tale.txt"


def test_a_run_returns_the_model_and_its_metrics(tale: Path) -> None:
    lines: list[str] = []
    run = dt.train(SPEC, tale, steps=12, learning_rate=1e-2, swap={"position": "alibi"}, note=lines.append, **SMALL)
    assert not run.interrupted
    assert run.directory is None
    assert list(tale.parent.iterdir()) == [tale]
    assert len(run.history) == 12
    assert run.train_loss == pytest.approx(sum(metrics.loss for metrics in run.history) / 12)
    assert run.held_out_loss == run.history[-1].val_loss
    assert any(line.startswith("spec --swap position=alibi: ") for line in lines)
    assert "train loss (mean of the last 12 steps)" in str(run)
    assert f"held-out loss: {run.held_out_loss:.3f}" in str(run)
    assert run.model.spec.layers[0].mixer.position.kind == "alibi"  # type: ignore[attr-defined]
    json.dumps(run.to_dict())


def test_a_run_with_a_directory_can_be_loaded(tale: Path) -> None:
    run = dt.train(SPEC, tale, steps=3, out=tale.parent / "model", **SMALL)
    model = dt.load(tale.parent / "model")
    assert model.spec == run.model.spec
    assert model.tokenizer is not None
    assert len((tale.parent / "model" / "loss.jsonl").read_text().splitlines()) == 3


def test_options_are_checked(tale: Path) -> None:
    wrong = (("minutes", 0, "is not above 0"), ("warmup", 1.5, "is not from 0 to 1"), ("seed", -1, "is not from 0"))
    for option, value, problem in wrong:
        with pytest.raises(UsageError, match=f"{option}: .*{problem}"):
            dt.train(SPEC, tale, **{"steps": 1, option: value})  # type: ignore[arg-type]


def test_warm_up_is_a_fraction_of_the_steps(tale: Path) -> None:
    run = dt.train(SPEC, tale, steps=20, warmup=0.25, learning_rate=1e-3, **SMALL)
    rates = [metrics.lr for metrics in run.history]
    assert rates.index(max(rates)) == 4
    assert rates[0] < 0.25 * max(rates)


@pytest.mark.slow
def test_ctrl_c_in_python_ends_the_run_and_keeps_it(tale: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with the signal ignored
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run = dt.train(SPEC, tale, minutes=5, out=tale.parent / "model", **SMALL)
    timer.join()
    assert run.interrupted
    assert run.history[-1].val_loss is not None
    assert len((tale.parent / "model" / "loss.jsonl").read_text().splitlines()) == len(run.history)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_saves_model_losses_and_picture(tale: Path) -> None:
    home = tale.parent
    (home / "spec.yaml").write_text(SPEC)
    args = ["train", "spec.yaml", "--text", "tale.txt", "--minutes=5", "--batch=4", "--length=16", "-o", "model"]
    command = [sys.executable, "-m", "dovetail", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits a signal that is ignored
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "held out" in line:
                break
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "(interrupted)" in out
    assert "the model and its losses are in model" in err
    names = {path.name for path in (home / "model").iterdir()}
    assert {"dovetail.yaml", "model.safetensors", "tokenizer.json", "loss.jsonl"} <= names
    pytest.importorskip("matplotlib")
    assert "loss.png" in names
    assert dt.load(home / "model").spec.width == 28
