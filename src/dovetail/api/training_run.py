"""TrainingRun: what `train` returns, a trained model with its metrics."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.api.result import INTERRUPTED, Result
from dovetail.spec.fold import parameters
from dovetail.training.metrics import StepMetrics
from dovetail.views.blocks import View
from dovetail.views.runs import training_view

if TYPE_CHECKING:
    from dovetail.model.transformer import Transformer
    from dovetail.text.tokenizer import Tokenizer

LAST_STEPS = 50  # steps whose mean loss is reported: a single step's loss is noisy


@dc.dataclass(frozen=True, repr=False, eq=False)
class TrainingRun(Result):
    """A trained model and its metrics; losses are in nats per token."""

    name: str
    model: Transformer
    tokenizer: Tokenizer | None  # None where it was trained on images
    history: tuple[StepMetrics, ...]
    interrupted: bool  # Ctrl-C ended the run early
    directory: Path | None = None  # the model directory that was written
    held_out_bits_per_byte: float | None = None  # comparable between vocabularies; None where it does not generate text
    prompt: str = ""
    sample: str | None = None

    @property
    def held_out_loss(self) -> float | None:
        """The loss on held-out text at the end."""
        return self.history[-1].val_loss

    @property
    def train_loss(self) -> float:
        """The mean training loss of the last steps."""
        tail = self.history[-LAST_STEPS:]
        return sum(metrics.loss for metrics in tail) / len(tail)

    @property
    def mfu(self) -> float | None:
        """The mean model FLOPs utilization of the last steps, against the peak that was measured."""
        tail = [metrics.mfu for metrics in self.history[-LAST_STEPS:] if metrics.mfu is not None]
        return sum(tail) / len(tail) if tail else None

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.interrupted else 0

    @property
    def remark(self) -> str:
        if not self.interrupted:
            return ""
        place = (
            f"; the model and its losses are in {self.directory}; the same command resumes the run" if self.directory else ""
        )
        return f"interrupted after step {self.history[-1].step}{place}"

    def to_dict(self) -> dict[str, Any]:
        last = self.history[-1]
        data: dict[str, Any] = {
            "directory": None if self.directory is None else str(self.directory),
            "parameters": parameters(self.model.spec),
            "steps": last.step,
            "tokens": last.tokens,
            "seconds": round(last.seconds, 1),
            "tokens_per_second": round(last.tokens / last.seconds),
            "mfu": self.mfu,
            "first_loss": self.history[0].loss,
            "train_loss": self.train_loss,
            "train_loss_steps": len(self.history[-LAST_STEPS:]),
            "held_out_loss": self.held_out_loss,
            **{f"held_out_{name}": value for name, value in (last.val_metrics or {}).items()},
        }
        if self.held_out_bits_per_byte is not None:
            data["held_out_bits_per_byte"] = self.held_out_bits_per_byte
        if self.sample is not None:
            data["sample"] = self.sample
        return {**data, "interrupted": self.interrupted}

    def view(self, width: int) -> View:
        sample = None if self.sample is None else (self.prompt, self.sample)
        return training_view(self.to_dict(), self.history[-1].val_metrics or {}, sample)
