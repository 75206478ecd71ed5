"""What a run of a lab measured, in a file beside its directory. No torch: a process that trains starts in the time of `train`.

OUT/runs/gqa-seed3-5f2a9c01d3be/          an ordinary run directory, which `dovetail runs` and `dovetail look` read
OUT/runs/gqa-seed3-5f2a9c01d3be.json      what it measured; written last, so that a run without it is not complete
"""

from __future__ import annotations

import dataclasses as dc
import functools
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.disk.shape import check_shape
from dovetail.disk.untrusted import parse_object, read_regular

TUNING_SEED = 1_000_000  # the first seed of runs that choose a learning rate: no verdict and no fit reads them
RESULT_BYTES = 1 << 24
NAMES = {  # metric -> its name in what a run reports
    "val_loss": "held_out_loss",
    "train_loss": "train_loss",
    "bits_per_byte": "held_out_bits_per_byte",
    "accuracy": "held_out_accuracy",
    "exact_match": "held_out_exact_match",
    "probe_accuracy": "probe_accuracy",
    "used_length": "probe_used_length",
}
SHAPE = {"report": {str: object}, "curve": [[float]], "diverged?": str}


@dc.dataclass(frozen=True)
class TrainedRun:
    """What a run measured."""

    name: str
    report: Mapping[str, Any]  # of TrainingRun.to_dict
    curve: tuple[tuple[float, float, float], ...]  # (tokens, seconds, held-out loss) at each eval
    diverged: str = ""  # the error of a run whose loss is not finite

    def metric(self, name: str) -> float:
        """A metric of the run; NaN where it diverged."""
        if self.diverged:
            return math.nan
        value = self.report.get(NAMES.get(name, name))
        if value is None:
            raise FileError(f"{self.name}: a run of this model and data does not measure {name}; choose another metric")
        return float(value)


@functools.cache
def versions() -> dict[str, str]:
    """The versions that determine a run."""
    return {"dovetail": import_module("dovetail").__version__, "torch": version("torch"), "python": platform.python_version()}


@functools.cache
def sources_digest() -> str:
    """The SHA-256 of the sources of this package: a commit, also where there is no repository."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def result_file(place: Path) -> Path:
    """Where a run's result is."""
    return place.with_name(f"{place.name}.json")


def read_result(place: Path) -> TrainedRun | None:
    """What the run in a directory measured; None if it is not complete."""
    path = result_file(place)
    if not path.is_file():
        return None
    data = parse_object(read_regular(path, RESULT_BYTES, "the result of a run").encode(), str(path))
    check_shape(data, SHAPE, str(path))
    curve = tuple((float(tokens), float(seconds), float(loss)) for tokens, seconds, loss in data["curve"])
    return TrainedRun(place.name, data["report"], curve, data.get("diverged", ""))


def result_text(report: Mapping[str, Any], curve: list[list[float]], diverged: str = "") -> str:
    """What is written into a result file."""
    finite = {name: value for name, value in report.items() if not isinstance(value, float) or math.isfinite(value)}
    extra = {"diverged": diverged} if diverged else {}
    return json.dumps({"report": finite, "curve": curve, "versions": versions(), **extra}, indent=1) + "\n"
