"""A stand-in for `train` that the processes of a lab call: losses are drawn, nothing is trained.

A loss is that of the seed, which all arms share, plus the noise of the arm, plus what the learning rate and the arm change:
the number of KV heads: FAKE_EFFECT in the environment per KV head fewer than 4.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.base.errors import Diverged, FileError
from dovetail.experiments.results import result_file

COMPLETE = "-was-complete"  # of a start that must not be
NOISE, SHARED, BEST_RATE = 0.01, 0.1, 1e-2


class Eval(NamedTuple):
    tokens: int
    seconds: float
    val_loss: float | None


class FakeRun:
    def __init__(self, loss: float) -> None:
        self.loss, self.history = loss, (Eval(1000, 0.5, loss + 1), Eval(2000, 1.0, loss))

    def to_dict(self) -> dict[str, Any]:
        return {"held_out_loss": self.loss, "train_loss": self.loss, "seconds": 1.0, "tokens": 2000, "interrupted": False}


def loss_of(arguments: Mapping[str, Any]) -> float:
    heads = arguments["spec"]["layers"][0].get("mixer", {}).get("kv_heads", 4)
    seed, rate = arguments["seed"], arguments.get("learning_rate", BEST_RATE)
    determined = json.dumps([heads, seed, rate, arguments.get("optimizer")])
    own = random.Random(hashlib.sha256(determined.encode()).hexdigest()).gauss(0, NOISE)
    shared = random.Random(seed).gauss(0, SHARED)
    effect = float(os.environ.get("FAKE_EFFECT", "0")) * (4 - heads)
    return 2.5 + shared + own + effect + 0.2 * math.log10(rate / BEST_RATE) ** 2


def train(arguments: Mapping[str, Any], out: Path, quiet: bool) -> FakeRun:
    assert quiet
    out.mkdir(parents=True, exist_ok=True)
    with (out.parent.parent / "starts.txt").open("a", encoding="utf-8") as starts:
        starts.write(f"{out.name}{COMPLETE if result_file(out).exists() else ''}\n")
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    if os.environ.get("FAKE_PROBLEM") == "diverged" and arguments["seed"] == 1:
        raise Diverged("the loss is nan at step 7")
    if os.environ.get("FAKE_PROBLEM") == "error":
        raise FileError("plays.txt: is empty")
    if os.environ.get("FAKE_PROBLEM") == "killed" and not (out / "tried").exists():
        (out / "tried").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("FAKE_PROBLEM") == "always killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return FakeRun(loss_of(arguments))
