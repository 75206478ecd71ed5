"""A run that survives: its settings, its metrics and its checkpoints in a directory, from which the same settings resume it.

    OUT/dovetail.yaml, tokenizer.json     from the start
    OUT/run.yaml                          the settings (training/settings.py); a run with others is refused
    OUT/initial.json                      digests of the initial weights (training/record.py)
    OUT/loss.jsonl                        the metrics of each step
    OUT/reference.safetensors             of preference tuning: log-probs of the initial weights (training/reference.py)
    OUT/samples.jsonl                     text that was generated as training went (training/samples.py)
    OUT/tensorboard/, OUT/wandb/          the metrics, where they were asked for (training/metrics.py)
    OUT/checkpoints/step-00000120/        weights, optimizer, moving average, position in the data (training/checkpoint.py)
    OUT/model.safetensors                 at the end; adapter.yaml and adapter.safetensors of an adapter

A batch and every random number are functions of (seed, step), so that a checkpoint needs no generator's state: after kill -9
and the same command again, the last weights are those of the unbroken run, bit for bit.
"""

from __future__ import annotations

import dataclasses as dc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dovetail.base.errors import FileError
from dovetail.disk.atomic import try_lock, write_atomically
from dovetail.disk.model_files import (
    CARRIED,
    INITIAL_FILE,
    KEPT_CONFIG,
    LOSSES_FILE,
    REFERENCE_FILE,
    RUN_FILE,
    SAMPLES_FILE,
)
from dovetail.disk.replace import replacing
from dovetail.disk.shape import check_shape
from dovetail.disk.yaml import dump_yaml
from dovetail.files.model_dir import must_be_free
from dovetail.model.model import Model
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints
from dovetail.training.export import write_model, write_trained_adapter
from dovetail.training.metrics import LOGS, MetricsLog, StepMetrics, read_metrics, to_jsonl
from dovetail.training.plan import CHECKPOINT_MINUTES, KEEP, Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.settings import FREE, differing, read_run
from dovetail.training.step import Trainer
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.storage import Base

# stay when the weights are written
BESIDE = (*CARRIED, KEPT_CONFIG, LOSSES_FILE, SAMPLES_FILE, RUN_FILE, INITIAL_FILE, REFERENCE_FILE)
NUMBERS = {"step": int, "tokens": int, "steps": (int, type(None)), "minutes": (float, type(None))}  # of a checkpoint
LOCK_TRIES = 10  # `dovetail runs` takes the lock for an instant, to see whether the run is alive
OWN = (CHECKPOINTS, *LOGS)  # sub-directories of a run


class RunDirectory:
    """The directory of a run, locked while this process trains in it. A Recorder of the training loop; every rank has one."""

    def __init__(
        self,
        place: Path,
        plan: Plan,
        ranks: JobRanks | None = None,
        every: float = CHECKPOINT_MINUTES,
        keep: int = KEEP,
        logs: Sequence[MetricsLog] = (),
    ) -> None:
        self.place, self.plan, self.every = place, plan, every  # minutes between checkpoints
        self.ranks = ranks or JobRanks()
        self.logs, self.open_logs = (logs if self.ranks.first else ()), list[MetricsLog]()
        self.checkpoints = Checkpoints(place / CHECKPOINTS, keep, self.ranks.timeout)
        self.newest: Path | None = None  # the checkpoint that was restored or taken last
        self.losses: TextIO | None = None
        self.taken = time.monotonic()
        self.lock = self.ranks.on_first_rank(self._lock)

    def _lock(self) -> int:
        lock = os.open(self.place / RUN_FILE, os.O_RDONLY | os.O_CLOEXEC)
        for _ in range(LOCK_TRIES):
            if try_lock(lock):
                break
            time.sleep(0.02)
        else:
            os.close(lock)
            raise FileError(f"{self.place}: another process trains in this directory")
        return lock

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.losses is not None:
                self.losses.close()
            self._close_logs()
            self.checkpoints.wait()
        finally:
            if self.ranks.first:
                os.close(self.lock)

    def restore(self, trainer: Trainer) -> tuple[Plan, list[StepMetrics]]:
        """Put the newest checkpoint that verifies into the trainer; return the plan and the metrics up to it."""
        path = self.newest = self.checkpoints.latest()
        history: list[StepMetrics] = []
        if path is not None:
            numbers = self.checkpoints.load(path, trainer.tensors())
            check_shape(numbers, NUMBERS, f"{path}: numbers")
            self.plan = dc.replace(self.plan, steps=numbers["steps"], minutes=numbers["minutes"])
            history = self._metrics(numbers["step"])
        if self.ranks.first:
            write_atomically(self.place / LOSSES_FILE, to_jsonl(history))  # steps after the checkpoint are trained again
            self.losses = (self.place / LOSSES_FILE).open("a", encoding="utf-8")
        for log in self.logs:
            log.start(self.place, read_run(self.place), len(history))
            self.open_logs.append(log)
        self.taken = time.monotonic()
        return self.plan, history

    def due(self) -> bool:
        """Whether enough minutes have passed since the last checkpoint."""
        return time.monotonic() - self.taken > 60 * self.every

    def record(self, trainer: Trainer, plan: Plan, metrics: StepMetrics, due: bool, last: bool) -> None:
        """Write the metrics of a step; take a checkpoint where one is due, and after the last."""
        if self.losses is not None:
            self.losses.write(to_jsonl([metrics]))
            self.losses.flush()
        for log in self.open_logs:
            log.record(metrics)
        if not (due or last):
            return
        if self.losses is not None:
            os.fsync(self.losses.fileno())
        numbers = {"step": metrics.step, "tokens": metrics.tokens, "steps": plan.steps, "minutes": plan.minutes}
        self.newest = self.checkpoints.save_later(metrics.step, trainer.tensors(), numbers)
        self.taken = time.monotonic()
        if last:
            self._close_logs()  # before the directory is replaced
            self.checkpoints.wait()

    def _close_logs(self) -> None:
        while self.open_logs:
            self.open_logs.pop().close()

    def write_model(self, spec: Model) -> None:
        """Write the model of the checkpoint that this process restored or took last into the directory, on the first rank."""
        newest = self.newest
        if newest is None:
            raise FileError(f"{self.place}: holds no checkpoint to write the model of")
        names = [name for name in BESIDE if (self.place / name).is_file()]
        beside = {name: (self.place / name).read_bytes() for name in names}
        self.ranks.on_first_rank(lambda: write_model(newest, spec, self.place, beside))

    def write_adapter(self, kind: AdapterKind, base: Base) -> None:
        """Write the adapter of the checkpoint that this process restored or took last, on the first rank."""
        newest = self.newest
        if newest is None:
            raise FileError(f"{self.place}: holds no checkpoint to write the adapter of")
        self.ranks.on_first_rank(lambda: write_trained_adapter(newest, kind, base, self.place))

    def _metrics(self, step: int) -> list[StepMetrics]:
        """The metrics of the first steps."""
        with (self.place / LOSSES_FILE).open(encoding="utf-8") as lines:
            result = [read_metrics(line, str(self.place / LOSSES_FILE)) for _, line in zip(range(step), lines, strict=False)]
        if [metrics.step for metrics in result] != list(range(1, step + 1)):
            raise FileError(f"{self.place / LOSSES_FILE}: does not hold the metrics of steps 1 to {step}")
        return result


def open_run(place: Path, settings: Mapping[str, Any], files: Mapping[str, str | bytes], force: bool) -> bool:
    """Prepare the directory of a run; return whether it holds a run with these settings already, to be resumed.

    A directory with other contents is refused. With `force`, a model or a run there is replaced."""
    own = OWN if (place / RUN_FILE).is_file() else ()
    if own and not force:
        _check_same(place, settings)
        return True
    must_be_free(place, force, own)
    with replacing(place, lambda existing: None) as fresh:
        for name, content in {**files, RUN_FILE: dump_yaml(dict(settings)), LOSSES_FILE: ""}.items():
            (fresh / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return False


def _check_same(place: Path, settings: Mapping[str, Any]) -> None:
    """Raise FileError where the run of a directory has other settings."""
    for path, kept, here in differing(read_run(place), settings, FREE):
        short = f"{path} is {str(kept)[:60]} in {RUN_FILE}, and {str(here)[:60]} here"
        raise FileError(f"{place}: holds another run: {short}; choose another path with -o, or start over with --force")
