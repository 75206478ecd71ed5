"""Devices: memory, FLOP/s, links. A table of data (devices.yaml), and `cpu`, which is measured on this machine."""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.disk.yaml import parse_yaml


@dc.dataclass(frozen=True)
class Efficiency:
    """The fractions of its peaks that a device reaches in a run."""

    products: float = 1.0
    bandwidth: float = 1.0
    links: float = 1.0


@dc.dataclass(frozen=True)
class Latency:
    """Seconds that a collective takes beside its bytes."""

    within: float
    between: float


@dc.dataclass(frozen=True)
class Device:
    """A device and its links; bytes, seconds and FLOP/s."""

    name: str
    memory: float
    flops: Mapping[str, float]  # by the dtype of a product's inputs
    bandwidth: float  # of its memory
    node: int  # devices per node
    within: float  # bytes/s of one device to the others of its node
    between: float  # … and to other nodes
    latency: Latency
    reserved: float  # bytes of its memory that are not for tensors
    write: float  # bytes/s of one node to the file system of checkpoints
    efficiency: Efficiency = Efficiency()
    kernel: float = 0.0  # seconds per kernel that its work does not hide

    @property
    def usable(self) -> float:
        """Bytes of memory for tensors."""
        return self.memory - self.reserved

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in a dtype; of float32 where the table has no other."""
        return self.flops.get(dtype, self.flops["float32"])


@functools.cache
def devices() -> dict[str, Device]:
    """The devices of the table, by the name of their flag."""
    file = files("dovetail.planning") / "devices.yaml"
    table: dict[str, dict[str, Any]] = parse_yaml(file.read_text(encoding="utf-8"), "devices.yaml")
    return {name: _device(row) for name, row in table.items()}


def _device(row: dict[str, Any]) -> Device:
    return Device(**{**row, "latency": Latency(**row["latency"]), "efficiency": Efficiency(**row["efficiency"])})


def device_named(name: str) -> Device:
    """Return a device of the table; raise UsageError for a name that is not in it."""
    if name not in devices():
        raise UsageError(f"--device: {name!r} is not known; {names_or_nearest(name, devices(), 'devices')}")
    return devices()[name]
