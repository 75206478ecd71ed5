"""Metrics for TensorBoard and Weights & Biases, read back; a resumed run shows every step once."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.base.errors import UsageError
from dovetail.training import metrics

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "steps": 4, "evals": 2}


@pytest.fixture
def tale(tmp_path: Path) -> Path:
    path = tmp_path / "tale.txt"
    path.write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    return path


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, (run / "loss.jsonl").read_text().splitlines())}


def killed_after_two(run: Path) -> None:
    """As after kill -9 behind the second step's checkpoint."""
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "model.safetensors").unlink()


def test_tensorboard_shows_every_step_once(tale: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {**SMALL, "log": "tensorboard", "checkpoint_minutes": 1e-9, "keep": 9}
    dt.train(SPEC, tale, out=tmp_path / "run", **options)
    killed_after_two(tmp_path / "run")
    dt.train(SPEC, tale, out=tmp_path / "run", **options)
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2  # of the process that ended, and of the one after it
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {"loss", "lr", "tokens", "seconds", "grad_norm", "mfu", "val_loss", "val_perplexity"} == set(found.Tags()["scalars"])
    shown = {event.step: event.value for event in found.Scalars("loss")}
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]
    assert shown == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert [event.step for event in found.Scalars("val_loss")] == [2, 4]


def test_wandb_keeps_the_metrics(tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    dt.train(SPEC, tale, out=tmp_path / "run", log=["wandb"], **SMALL)
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert wandb.run is None, "the run is finished"
    shown = dict[int, float]()
    for record in records(kept.read_bytes()):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            shown[items["_step"]] = items["loss"]
    assert shown == losses(tmp_path / "run")


def records(log: bytes) -> Iterator[Any]:
    """The records of a log of Weights & Biases that fits into one block: behind seven bytes, (crc32, length, kind) and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    at = 7
    while at < len(log):
        length, kind = struct.unpack_from("<HB", log, at + 4)
        assert kind == 1, "a record is whole"
        yield Record.FromString(log[at + 7 : at + 7 + length])
        at += 7 + length


def test_what_cannot_be_logged_is_refused(tale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="log: 'mlflow' is not tensorboard or wandb"):
        dt.train(SPEC, tale, out=tmp_path / "run", log="mlflow", **SMALL)  # type: ignore[arg-type]
    monkeypatch.setattr(metrics, "find_module", lambda name: None)
    with pytest.raises(UsageError, match=r'log wandb: needs the package wandb: pip install "dovetail-lm\[wandb\]"'):
        dt.train(SPEC, tale, out=tmp_path / "run", log="wandb", **SMALL)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="log: give a directory"):
        dt.train(SPEC, tale, log="tensorboard", **SMALL)
