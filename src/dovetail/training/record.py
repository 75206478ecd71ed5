"""What a run directory says of its run: settings, metrics, state, and digests of the initial weights.

initial.json    {"layers.0.mixer.q.weight": {"shape": [96, 96], "sha256": "…"}, …}

By the digests two runs can be compared: did what they share start from the same bits? Reading a run changes nothing, and reads
no weight.
"""

from __future__ import annotations

import dataclasses as dc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dovetail.base.errors import DovetailError, FileError
from dovetail.data.bits import bits_per_byte
from dovetail.disk.atomic import try_locked, write_atomically
from dovetail.disk.model_files import INITIAL_FILE, LOSSES_FILE, RUN_FILE
from dovetail.disk.shape import check_shape
from dovetail.disk.untrusted import Directory
from dovetail.files.spec import from_mapping
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import held
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import parameters
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints, read_manifest
from dovetail.training.metrics import StepMetrics, read_metrics
from dovetail.training.settings import RECORDED, read_run
from dovetail.training.task import OBJECTIVES

# -- initial weights --------------------------------------------------------------------------------------------------


Digests = Mapping[str, Mapping[str, Any]]


def digests(model: Transformer) -> dict[str, dict[str, Any]]:
    """The shape and the SHA-256 of every weight that a checkpoint holds."""
    return {d.path: _digest(tensor_at(model, d.path)) for d in held(model, model.part) if d.checkpointed}


def _digest(tensor: torch.Tensor) -> dict[str, Any]:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def write_initial(place: Path, model: Transformer) -> None:
    """Write the digests into a run directory, once: a resumed run was built with the same initial weights."""
    if not (place / INITIAL_FILE).exists():
        write_atomically(place / INITIAL_FILE, json.dumps(digests(model), indent=0))


def read_initial(place: Path) -> Digests | None:
    """The digests of a run; None where there are none, as in a run on several ranks."""
    where = Directory(place)
    if not where.has(INITIAL_FILE):
        return None
    data = where.json(INITIAL_FILE)
    check_shape(data, {str: {"shape": [int], "sha256": str}}, str(where.place / INITIAL_FILE))
    return data


def shared(a: Digests, b: Digests) -> tuple[int, list[str]]:
    """(number of weights with the same path and shape in both, the paths of those with other initial values)."""
    common = [path for path in a if path in b and a[path]["shape"] == b[path]["shape"]]
    return len(common), [path for path in common if a[path]["sha256"] != b[path]["sha256"]]


# -- runs -------------------------------------------------------------------------------------------------------------


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

    def to_dict(self) -> dict[str, Any]:
        """Return its size and its last figures as plain data."""
        last = self.history[-1] if self.history else None
        return {
            "run": str(self.place),
            "layers": len(self.spec.layers),
            "parameters": parameters(self.spec),
            "steps": last.step if last else 0,
            "tokens": last.tokens if last else 0,
            "loss": last.loss if last else None,
            "held_out_loss": self.held_out_loss,
            "bits_per_byte": self.bits_per_byte,
            "mfu": last.mfu if last else None,
            "state": self.state,
        }


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
