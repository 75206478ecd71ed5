"""What a run directory says of its run: settings, metrics, state. Nothing is changed, and no weight is read."""

from __future__ import annotations

import dataclasses as dc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dovetail.core.errors import DovetailError, FileError
from dovetail.data.bits import bits_per_byte
from dovetail.disk.atomic import try_locked
from dovetail.disk.model_files import LOSSES_FILE, RUN_FILE
from dovetail.disk.shape import check_shape
from dovetail.files.spec import from_mapping
from dovetail.model import Model
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints, read_manifest
from dovetail.training.initial import Digests, read_initial
from dovetail.training.metrics import StepMetrics, read_metrics
from dovetail.training.settings import RECORDED, read_run
from dovetail.training.task import OBJECTIVES

DEPTH = 4  # levels of directories in which runs are looked for
SHAPE = {  # of what is read of a run file, beside the spec
    "steps?": int,
    "minutes?": float,
    "objective?": str,
    f"{RECORDED}?": {"data?": {"name?": str, "sha256?": str, "held_out_tokens?": int, "held_out_bytes?": int}},
}
State = Literal["running", "complete", "interrupted"]


@dc.dataclass(frozen=True)
class RunRecord:
    """A run, from its directory."""

    place: Path
    settings: dict[str, Any]
    spec: Model
    history: tuple[StepMetrics, ...]
    state: State
    initial: Digests | None  # digests of the initial weights

    @property
    def held_out_loss(self) -> float | None:
        """The newest held-out loss."""
        return next((m.val_loss for m in reversed(self.history) if m.val_loss is not None), None)

    @property
    def bits_per_byte(self) -> float | None:
        """The held-out loss as bits per byte of text; None for a model that does not predict the next token."""
        data, loss = self.settings.get(RECORDED, {}).get("data", {}), self.held_out_loss
        objective = OBJECTIVES.get(self.settings.get("objective", ""))
        if loss is None or objective is None or not objective.generates or not data.get("held_out_bytes"):
            return None
        return bits_per_byte(loss, 1, data["held_out_tokens"], data["held_out_bytes"])


def read_record(place: Path) -> RunRecord:
    """Read the directory of a run."""
    settings = read_run(place)
    history = tuple(_metrics(place / LOSSES_FILE))
    if not isinstance(settings.get("spec"), Mapping):
        raise FileError(f"{place / RUN_FILE}: holds no spec")
    check_shape(settings, SHAPE, str(place / RUN_FILE))
    spec = from_mapping(settings["spec"])
    return RunRecord(place, settings, spec, history, _state(place, settings, history), read_initial(place))


def find_runs(places: list[Path]) -> list[Path]:
    """The run directories among the given ones and below them, each once."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise FileError(f"{place}: no such directory")
        for directory, inner, files in os.walk(place):
            depth = len(Path(directory).relative_to(place).parts)
            if RUN_FILE in files and LOSSES_FILE in files:
                found[Path(directory)] = None
                inner.clear()
            inner[:] = sorted(name for name in inner if not name.startswith(".")) if depth < DEPTH else []
    return list(found)


def _metrics(path: Path) -> Iterator[StepMetrics]:
    """The metrics of each step; a line that is being written is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield read_metrics(line, str(path))


def _state(place: Path, settings: dict[str, Any], history: tuple[StepMetrics, ...]) -> State:
    """running: a process has the lock; complete: the last step is recorded; else interrupted."""
    with try_locked(place / RUN_FILE) as free:
        if not free:
            return "running"
    steps = settings.get("steps") if "minutes" not in settings else _measured_steps(place)
    return "complete" if steps is not None and history and history[-1].step >= steps else "interrupted"


def _measured_steps(place: Path) -> int | None:
    """The number of steps that a run limited by minutes has set itself, from its newest checkpoint."""
    newest = Checkpoints(place / CHECKPOINTS).complete()[-1:]
    try:
        steps = read_manifest(newest[0]).numbers.get("steps") if newest else None
        return steps if isinstance(steps, int) else None
    except DovetailError:  # damaged: the run is not known to be complete
        return None
