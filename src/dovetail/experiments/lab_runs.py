"""A run of a lab: its arguments for `train`, the hash by which it is found again, and its directory.

The hash is of everything that determines the run: the spec, the settings, the seed, the digests of the data, and the versions
of dovetail and torch. Two arms that ask for one and the same run share it.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError
from dovetail.data.manifest import MANIFEST_FILE
from dovetail.data.tasks.task import read_synthetic_task
from dovetail.disk.shape import data_sha256, file_sha256
from dovetail.experiments.arms import Arm, run_settings
from dovetail.experiments.design import LabDesign
from dovetail.experiments.long_context import PROBE
from dovetail.experiments.outside_metric import ARGUMENT
from dovetail.experiments.results import versions
from dovetail.spec.part import plain
from dovetail.training.settings import FREE

RUNS = "runs"
HASH = 12  # characters of the hash in a name


@dc.dataclass(frozen=True)
class RunRequest:
    """A run that a lab asks for."""

    arm: str
    seed: int
    rate: float | None  # the learning rate; None: that of `train`
    tuning: bool  # whether it chooses a learning rate
    key: str  # the hash of what determines it
    arguments: Mapping[str, Any] = dc.field(hash=False, compare=False)

    @property
    def name(self) -> str:
        """The name of a new directory."""
        return f"{self.arm}-seed{self.seed}-{self.key}"


def digests(design: LabDesign) -> dict[str, str]:
    """The SHA-256 of each file of the data; of a corpus that of its manifest, which has those of its shards; of a task that of
    its fields."""
    found: dict[str, str] = {}
    for key, value in design.data.items():
        if key == "task":
            found[str(value)] = data_sha256({key: plain(read_synthetic_task(value, f"data.{key}"))})
            continue
        for item in value if isinstance(value, list) else [value]:
            path = Path(str(item).partition("=")[0] if key == "data" else str(item))
            if not path.exists():
                raise FileError(f"data.{key}: there is no {path}")
            found[str(item)] = file_sha256(path / MANIFEST_FILE if path.is_dir() else path)
    return found if design.outside is None else {**found, **design.outside.digests()}


def request(design: LabDesign, arm: Arm, seed: int, rate: float | None, tuning: bool, data: Mapping[str, str]) -> RunRequest:
    """Return the run of an arm at a seed; `data` are the digests."""
    arguments = {"spec": arm.spec.to_data(), **design.data, **run_settings(arm.train, arm.budget), "seed": seed}
    if design.probe is not None:
        arguments[PROBE] = dict(design.probe)
    if rate is not None:
        arguments["learning_rate"] = rate
    determines = {key: value for key, value in arguments.items() if key not in FREE and key not in design.data}
    if design.outside is not None:
        arguments[ARGUMENT] = dc.asdict(design.outside)
        determines[ARGUMENT] = {**arguments[ARGUMENT], "tasks": None}  # the directory may be moved, too
    weights = {digest: item.partition("=")[2] for item, digest in data.items()}  # not the path: the data may be moved
    key = data_sha256({"arguments": determines, "data": weights, "versions": versions()})[:HASH]
    return RunRequest(arm.name, seed, rate, tuning, key, arguments)


def find_run(runs: Path, wanted: RunRequest) -> Path:
    """The directory of a run: one that has its hash, else a new one."""
    ends = f"-{wanted.key}", f"-{wanted.key}.json"
    found = (path for path in sorted(runs.iterdir()) if path.name.endswith(ends) and not path.name.startswith("."))
    return next((path.with_name(path.name.removesuffix(".json")) for path in found), runs / wanted.name)  # 1.5M has a dot
