"""Signals, broken files, memory and time: what must never crash a verb, keep it alive, or let it grow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dovetail.construction import build
from dovetail.core.layout import TokenLayout
from dovetail.datasets.corpus import Batch
from dovetail.dist.layout import Layout
from dovetail.io.spec import from_yaml
from dovetail.planning.trace import Setting, trace_step
from dovetail.training.loop import train
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.speed import Speed

SOON, LONGEST = 2.0, 10.0  # seconds after a signal
HEAD = """
import hashlib, subprocess, sys, time, weakref
from pathlib import Path
from dovetail import cli
from dovetail.cli import show
from dovetail.core.ending import delaying

class Thing:
    pass

def lost(self):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: (print("here", flush=True), time.sleep(5)))
    del thing  # the exception is raised in the callback, and dropped
    time.sleep(60)

def in_c(self):
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in which no handler runs

def with_child(self):
    child = subprocess.Popen(["sleep", "1234"])
    Path("child").write_text(str(child.pid))
    lost(self)

def writes(self):
    with delaying():
        print("here", flush=True)
        time.sleep(3)
        Path("checkpoint").write_text("whole")
    time.sleep(60)

def writes_long(self):
    with delaying():
        print("here", flush=True)
        time.sleep(60)
    Path("checkpoint").write_text("whole")

show.Command.run = globals()[sys.argv[2]]
sys.argv[1:] = ["show", "llama-tiny"]
cli.main()
"""


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )


def seconds_to_end(child: subprocess.Popen[str], number: int) -> tuple[float, str]:
    """Send the signal; return the seconds until the process has ended, and its stderr."""
    begin = time.monotonic()
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    return time.monotonic() - begin, err


def interrupted(name: str, number: int, folder: Path) -> tuple[float, subprocess.Popen[str], str]:
    child = started([sys.executable, "-c", HEAD, "-", name], folder)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    time.sleep(0.1)
    seconds, err = seconds_to_end(child, number)
    return seconds, child, err


@pytest.mark.parametrize("name", ["lost", "in_c"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_c5_a_signal_ends_a_verb_that_does_not_see_it(name: str, number: int, code: int, tmp_path: Path) -> None:
    seconds, child, err = interrupted(name, number, tmp_path)
    assert child.returncode == code
    assert seconds < SOON
    assert err.splitlines()[-1] == f"dovetail: {'terminated' if code == 143 else 'interrupted'}"


def test_c5_children_end_with_the_verb(tmp_path: Path) -> None:
    seconds, child, _ = interrupted("with_child", signal.SIGTERM, tmp_path)
    assert (child.returncode, seconds < SOON) == (143, True)
    left = Path("/proc", (tmp_path / "child").read_text(), "cmdline")
    deadline = time.monotonic() + 2
    while left.exists() and left.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (left.exists() and left.read_bytes())


def test_c5_a_checkpoint_is_finished_first(tmp_path: Path) -> None:
    seconds, child, _ = interrupted("writes", signal.SIGTERM, tmp_path)
    assert child.returncode == 143
    assert (tmp_path / "checkpoint").read_text() == "whole"
    assert SOON < seconds < 3 + SOON


def test_c5_a_checkpoint_delays_ten_seconds_at_most(tmp_path: Path) -> None:
    seconds, child, _ = interrupted("writes_long", signal.SIGTERM, tmp_path)
    assert child.returncode == 143
    assert SOON < seconds < LONGEST
    assert not (tmp_path / "checkpoint").exists()


# -- plans and runs ---------------------------------------------------------------------------------------------------

SPEC = """
width: 32
vocab: 62
head: {kind: lm, tied: false}
layers: [{repeat: 4, mixer: {heads: 4, kv_heads: 4}, ffn: {hidden: 48}}]
"""


def test_c6_layouts_are_traced_one_after_another() -> None:
    """DTensor's caches know a mesh by its shape: a second layout met the process groups of the first."""
    setting = Setting(rows=1, length=16, micro_batches=4)
    layouts = [
        Layout(pipeline=2, replicas=4, shards=1, sequence=2, tensor=2),
        Layout(pipeline=2, replicas=1, shards=4, sequence=2, tensor=2),
        Layout(pipeline=2, replicas=8, shards=1, tensor=2),
        Layout(pipeline=2, replicas=1, shards=8, tensor=2),
    ]
    spec = from_yaml(SPEC)
    one_way = [trace_step(spec, layout, setting) for layout in layouts]
    other_way = [trace_step(spec, layout, setting) for layout in reversed(layouts)]
    assert [trace.cost.traffic for trace in one_way] == [trace.cost.traffic for trace in reversed(other_way)]
    norms = [{one.kind: one.group for one in trace.cost.traffic} for trace in one_way]
    assert all("all-reduce" in kinds for kinds in norms)


def test_c7_a_run_limited_by_minutes_ends_in_time_on_a_machine_that_becomes_slow() -> None:
    tokens = torch.arange(48).reshape(4, 12) % 62
    batch = Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(4, 11))

    def batches(step: int) -> Batch:
        time.sleep(0.0 if step < 3 else 0.25)
        return batch

    begin = time.monotonic()
    history = train(build(from_yaml(SPEC)), batches, next_token, Plan(minutes=0.1, quiet=True))
    assert time.monotonic() - begin < 3 * 6.0
    assert history[-1].lr < 0.2 * max(metrics.lr for metrics in history), "the schedule ends with the run"


def test_c7_a_step_is_never_faster_than_the_peak() -> None:
    """A peak that was measured on a busy machine is measured again."""
    peaks = iter([20.0, 100.0])
    speed = Speed(flops_per_token=1.0, peak=10.0, measure=lambda: next(peaks))
    assert speed.mfu(5, 1.0) == 0.5
    assert speed.mfu(33, 1.0) is None, "still above the peak"
    assert speed.mfu(33, 1.0) == 0.33
    assert Speed(1.0, 10.0).mfu(33, 1.0) is None
