"""Faults of training runs: kills, interrupts, a gradient that is not a number  (rows of faults.py)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch
from faults_process import SPEC, Run, in_child, make_home
from measure import Goal, Row

from dovetail.base.errors import Diverged
from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.step import Trainer

NONE = Goal(high=0)


def c2(place: Path, steps: int = 200, stops: tuple[int, ...] = (37, 101, 150), ranks: tuple[int, ...] = (1, 2)) -> list[Row]:
    """Ctrl-C after some steps and the same command again, against an unbroken run."""
    home, rows = make_home(place), list[Row]()
    for count in ranks:
        whole, broken = (Run(home, f"{name}-{count}", steps, count, ()) for name in ("whole", "broken"))
        expect(whole.finish(), 0, whole)
        for stop in stops:
            expect(broken.finish({"interrupt": stop}), 130, broken)
            if len(broken.losses()) != stop:
                raise SystemExit(f"interrupted after {len(broken.losses())} steps, not {stop}")
        expect(broken.finish(), 0, broken)
        losses = sum(a != b for a, b in zip(whole.losses(), broken.losses(), strict=True))
        files = whole.digests()
        differing = sum(files[name] != other for name, other in broken.digests().items())
        on = f"{count} rank{'s' * (count > 1)}"
        resumed = f"resumes at {', '.join(map(str, stops))} of {steps} steps"
        rows += [
            Row(f"C2 {on}: losses that differ from the unbroken run's, {resumed}", losses, NONE),
            Row(f"C2 {on}: of {len(files)} files, weights and optimizer, sha256 that differ", differing, NONE),
        ]
    return rows


def kills(place: Path, steps: int = 300, count: int = 20) -> list[Row]:
    """SIGKILL at random moments and the same command again; a run that ends meanwhile begins anew."""
    home, rng = make_home(place), random.Random(11)
    flags = ("--checkpoint-minutes=0.002",)
    whole, broken = Run(home, "whole", steps, flags=flags), Run(home, "broken", steps, flags=flags)
    begin = time.monotonic()
    expect(whole.finish(), 0, whole)
    length, done, ended, equal = time.monotonic() - begin, 0, 0, 0
    expected = whole.digests()["model.safetensors"]
    while done < count or not ended:
        (child,) = broken.start()
        if done < count:
            time.sleep(rng.uniform(0, 3 * length / count))
            os.kill(child, signal.SIGKILL)  # not waited for yet: the id is its own
        (code,) = broken.end([child])
        done += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"after a kill the run ended with {code}\n{broken.errors()[-3000:]}")
        if code == 0:
            ended, equal = ended + 1, equal + (broken.digests()["model.safetensors"] == expected)
            shutil.rmtree(broken.place)
    return [
        Row("kill -9 at random moments, the same command again: kills", done, Goal(low=count)),
        Row(f"… runs that ended, of {steps} steps", ended),
        Row("… of these, with another sha256 of the weights than the unbroken run", ended - equal, NONE),
    ]


def c9(place: Path, step: int = 7, steps: int = 12, ranks: tuple[int, ...] = (1, 2)) -> list[Row]:
    """A gradient that is not a number."""
    home, rows = make_home(place), list[Row]()
    for count in ranks:
        run = Run(home, f"run-{count}", steps, count)
        codes = run.finish({"nan": step})
        found = json.loads((home / "nan.json").read_text())
        first = 4 * (step - 1)
        messages = (f"step {step}: the loss is", f"on the batch of samples {first} to {first + 3} (")
        named = all(message in run.errors() for message in messages)
        on = f"C9 NaN gradient at step {step}, {count} rank{'s' * (count > 1)}"
        rows += [
            Row(f"{on}: of {found['tensors']} tensors, weights and optimizer, changed", found["changed"], NONE),
            Row(f"{on}: exit code", max(codes), Goal(Diverged.exit_code, Diverged.exit_code)),
            Row(f"{on}: the step and the samples of the batch are named", named, Goal(low=1)),
        ]
    return rows


def c10(place: Path) -> list[Row]:
    """Accumulation 8 × 1 against 1 × 8, on ragged rows with ignored labels."""
    name = "C10 accumulation 8×1 against 1×8, ragged, ignored labels: relative error of the gradient, in millionths"
    return [Row(name, 1e6 * in_child(_accumulated), Goal(high=1))]


def _accumulated() -> float:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 512, (8, 33), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(8, 32, generator=generator) < 0.3, IGNORED)
    batch = Batch(tokens[:, :-1], labels, TokenLayout.padded([32, 3, 17, 1, 32, 25, 2, 9], 32))

    def gradient(pieces: int) -> torch.Tensor:
        trainer = Trainer(build(from_yaml(SPEC)).train(), next_token, Plan(steps=1, clip=1e9, micro_batches=pieces))
        trainer.step(batch, 0, 0.0)
        return torch.cat([weight.grad.flatten().double() for weight in trainer.weights if weight.grad is not None])

    whole = gradient(1)
    return float((gradient(8) - whole).norm() / whole.norm())


def expect(codes: list[int], code: int, run: Run) -> None:
    """Stop unless every rank ended with this exit code."""
    if set(codes) != {code}:
        raise SystemExit(f"{' '.join(run.args)}: ended with {codes}, not {code}\n{run.errors()[-3000:]}")
