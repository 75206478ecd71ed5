"""Signals, broken files, memory and time: what must never crash a verb, keep it alive, or let it grow."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import dovetail as dt
from dovetail.base.errors import DovetailError, FileError, SpecError
from dovetail.data.corpus import Batch
from dovetail.data.manifest import Manifest
from dovetail.disk.shape import data_sha256
from dovetail.files.spec import from_yaml
from dovetail.hf.peft import read_peft, write_peft
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.layout import Layout
from dovetail.planning.trace import Setting, trace_step
from dovetail.training.checkpoint import read_manifest
from dovetail.training.loop import train
from dovetail.training.metrics import Speed
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.record import read_record
from dovetail.weights.adapters.attach import read_adapter
from dovetail.weights.adapters.storage import Stored, adapter_tensors
from dovetail.weights.quantization.recipe import read_recipe

SOON, LONGEST = 2.0, 10.0  # seconds after a signal
HEAD = """
import hashlib, subprocess, sys, time, weakref
from pathlib import Path
from dovetail import cli
from dovetail.cli.command import Command
from dovetail.base.termination import delaying

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

verb = globals()[sys.argv[2]]
Command.run = lambda self, given: verb(self)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_c5_a_checkpoint_is_finished_first(tmp_path: Path) -> None:
    seconds, child, _ = interrupted("writes", signal.SIGTERM, tmp_path)
    assert child.returncode == 143
    assert (tmp_path / "checkpoint").read_text() == "whole"
    assert SOON < seconds < 3 + SOON


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- files ------------------------------------------------------------------------------------------------------------

ODD = [None, "x", -1, 1.5, True, [], {}, [[1]], [{"a": []}], {"a": [1]}, math.inf]


def changes(data: Any) -> Iterator[tuple[str, Any]]:
    """(path, copy of the data with one value replaced or left out)."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        items = value.items() if isinstance(value, dict) else list(enumerate(value))[:2] if isinstance(value, list) else ()
        for key, one in items:
            yield from walk(one, (*path, key))

    for path in list(walk(data, ()))[1:]:
        for new in [*ODD, ...]:
            copied = copy.deepcopy(data)
            where = copied
            for key in path[:-1]:
                where = where[key]
            if new is ...:
                del where[path[-1]]
            else:
                where[path[-1]] = new
            yield f"{'.'.join(map(str, path))} = {new!r}", copied


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "text.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    spec = SPEC.replace("vocab: 62", "vocab: 280")
    dt.train(spec, place / "text.txt", steps=2, batch=2, length=8, out=place / "run", quiet=True, sample=0)
    return place


def survives(call: Callable[[], Any], shown: str) -> None:
    """The call returns, or raises an error with a message for the user."""
    try:
        call()
    except DovetailError:
        return
    except Exception as error:
        raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error


def test_c1_an_edited_spec_of_a_run_is_reported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "edited")
    file = tmp_path / "edited" / "dovetail.yaml"
    file.write_text(file.read_text().replace("hidden: 48", "hidden: 56"))
    with pytest.raises(FileError, match="was the spec edited"):
        dt.train(from_=tmp_path / "edited", text=run / "text.txt", steps=1, batch=2, length=8, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.yaml", "initial.json", "loss.jsonl"])
def test_c2_edited_files_of_a_run_are_refused_or_read(name: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "run")
    file = tmp_path / "run" / name
    text = file.read_text()
    data = (
        yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text.splitlines()[0] if name == "loss.jsonl" else text)
    )
    if name == "initial.json":
        data = dict(list(data.items())[:2])
    if name == "run.yaml":
        del data["spec"]["layers"][1:]
    for shown, changed in changes(data):
        file.write_text(json.dumps(changed) + "\n")
        survives(lambda: read_record(tmp_path / "run"), shown)


def test_c2_edited_manifests_of_checkpoints_and_corpora_are_refused(run: Path, tmp_path: Path) -> None:
    dt.build_data(run / "text.txt", tmp_path / "tokens", workers=1, quiet=True, lines=True)
    shutil.copytree(run / "run", tmp_path / "run")
    for file, read in (
        (next((tmp_path / "run" / "checkpoints").iterdir()) / "manifest.json", read_manifest),
        (tmp_path / "tokens" / "manifest.json", Manifest.load),
    ):
        data = json.loads(file.read_text())
        if "tensors" in data:
            data["tensors"] = dict(list(data["tensors"].items())[:2])
        for shown, changed in changes(data):
            bare = {key: value for key, value in changed.items() if key != "sha256"}
            file.write_text(json.dumps({**bare, "sha256": data_sha256(bare)}))
            survives(functools.partial(read, file.parent), f"{file.name}: {shown}")


def test_c2_an_odd_recipe_is_refused() -> None:
    spec = from_yaml(SPEC)
    entry = {"kind": "int4", "group": 16, "leaves": ["layers.0.ffn.up"]}
    for shown, changed in changes({"formats": [entry]}):
        survives(functools.partial(read_recipe, json.dumps(changed), spec, "quantization.yaml"), shown)


@pytest.mark.slow
def test_c2_odd_peft_configs_are_refused(tmp_path: Path) -> None:
    spec = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 2, mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]\n")
    model = dt.build(spec)
    kind = read_adapter({"kind": "lora", "rank": 2, "targets": ["q"]})
    dt.attach(model, kind)
    (tmp_path / "peft").mkdir()
    write_peft(tmp_path / "peft", spec, Stored(kind, None, adapter_tensors(model)))
    file = tmp_path / "peft" / "adapter_config.json"
    for shown, changed in changes(json.loads(file.read_text())):
        file.write_text(json.dumps(changed))
        survives(lambda: read_peft(tmp_path / "peft", spec), shown)


@pytest.mark.slow
def test_c3_bytes_on_stdin_that_are_no_text_are_an_error(run: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "chat", str(run / "run")]
    done = subprocess.run(
        command, input=b"hello \xff\n", capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    )
    assert done.returncode != 70, done.stderr.decode()


def test_c3_images_for_an_embedding_of_tokens_and_patches(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(40) % 4)
    spec = "width: 28\nvocab: 62\nembed: {kind: tokens_and_patches, patch: 4}\nhead: {kind: classifier, classes: 4}\n"
    spec += "layers: [{mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]\n"
    with pytest.raises(SpecError, match="does not read whole images"):
        dt.train(spec, labels=tmp_path / "images.npz", steps=1, quiet=True)


MEASURED = """
import resource, sys
from dovetail.text.tokenizer import Tokenizer
from dovetail.text.learn import learn
tokenizer = learn("It was the best of times. " * 50, 280)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids = tokenizer.encode_batch([sys.argv[1] * (6_000_000 // len(sys.argv[1]))])[0]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, len(ids))
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", ["abcdefghij", "天地玄黃宇宙洪荒"])
def test_c4_text_without_spaces_is_encoded_in_bounded_memory(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, text], capture_output=True, text=True, check=True)
    megabytes, count = map(int, done.stdout.split())
    assert count >= 1_000_000
    assert megabytes < 700


@pytest.mark.slow
def test_c4_a_small_parquet_file_of_much_text_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": pa.array(["a" * 5_000_000] * 200).dictionary_encode()})
    parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    with pytest.raises(FileError, match="times its size"):
        dt.build_data(tmp_path / "bomb.parquet", tmp_path / "tokens", workers=1, quiet=True)
