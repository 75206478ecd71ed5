"""Samples: text that the model generates as training goes, at every few evals.

    samples.jsonl    {"step": 300, "tokens": 614400, "prompt": "The ", "text": "…"}         one line per sample

A sample is written before the checkpoint of its step, and a resumed run drops the lines of steps that it trains again: no step
is missing, and none has two lines.
"""

from __future__ import annotations

import dataclasses as dc
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dovetail.base.errors import DovetailError, FileError, UsageError
from dovetail.decoding.generation import Sampling, generate_tokens
from dovetail.disk.atomic import write_atomically
from dovetail.disk.shape import check_shape
from dovetail.model.model import ModelModule
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.metrics import StepMetrics
from dovetail.training.objective import Objective
from dovetail.training.ranks import JobRanks
from dovetail.training.step import Trainer


def sample_text(
    model: ModelModule, tokenizer: Tokenizer, prompt: str, count: int, sampling: Sampling, note: Callable[[str], None]
) -> str:
    """Return the text that the model generates after a prompt; where it cannot, why is noted: training is not to end by it."""
    try:
        ids = list(generate_tokens(model, tokenizer.encode(prompt), count, sampling))
    except DovetailError as error:  # e.g. a position table that is too short
        note(f"no sample: {error}")
        return ""
    return tokenizer.decode(ids)


def check_samples(objective: type[Objective], ranks: JobRanks) -> None:
    """Raise UsageError where no samples can be generated as training goes."""
    if not objective.generates:
        raise UsageError(f"--sample-every: a model that learns by {objective.name} does not continue a prompt; leave it out")
    if ranks.count > 1:
        raise UsageError("--sample-every: a model over several ranks is sampled from its directory; leave it out")


@dc.dataclass(frozen=True)
class Samples:
    """Generates a sample at every `every`-th eval, and adds it to a file."""

    tokenizer: Tokenizer
    prompt: str
    count: int  # tokens
    sampling: Sampling
    every: int
    path: Path | None  # None: samples are noted alone
    note: Callable[[str], None]

    def restore(self, step: int) -> None:
        """Drop the samples after a step, which are generated again."""
        if self.path is None:
            return
        lines: list[str] = []
        if self.path.is_file():
            with self.path.open(encoding="utf-8") as file:
                lines = list(file)
        write_atomically(self.path, "".join(line for line in lines if self._step(line) <= step))

    def _step(self, line: str) -> float:
        if not line.endswith("\n"):  # it was not written to its end
            return float("inf")
        try:
            data = json.loads(line)
            check_shape(data, {"step": int}, str(self.path))
            return data["step"]
        except (ValueError, RecursionError, FileError) as error:
            raise FileError(f"{self.path}: holds a line that is no sample: {line[:60]!r}; delete it") from error

    def take(self, trainer: Trainer, history: Sequence[StepMetrics]) -> None:
        """Generate a sample after a step, if it is one of the evals."""
        evals = sum(metrics.val_loss is not None for metrics in history)
        if history[-1].val_loss is None or evals % self.every:
            return
        with trainer.averaged(), trainer.computing(), torch.compiler.set_stance("force_eager"):  # no graph per length
            text = sample_text(trainer.model, self.tokenizer, self.prompt, self.count, self.sampling, self.note)
        self.note(f"step {history[-1].step}: {self.prompt}{text}")
        if self.path is not None:
            line = {"step": history[-1].step, "tokens": history[-1].tokens, "prompt": self.prompt, "text": text}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # as the metrics, before a checkpoint counts on it
