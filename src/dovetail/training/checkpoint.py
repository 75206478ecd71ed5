"""Checkpoints of a run: complete or absent.

    checkpoints/step-00000120.tmp/    rank-00000.safetensors, rank-00001.safetensors, …    each written and synced by its rank
    checkpoints/step-00000120/        … and manifest.json: numbers, chunks, bytes and sha256 of every file

Every rank writes its chunks; then one writes the manifest, syncs it and the directory, and renames the directory. A directory
that has its final name is complete, unless a disk damaged it afterwards: `latest` is the newest whose manifest and files have
the checksums that they were written with. The position of the data and the state of the optimizer are in the same commit as the
weights. A checkpoint that verifies is never overwritten. Ranks may be more or fewer when a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.base.limits import JSON_BYTES
from dovetail.base.termination import delaying
from dovetail.disk.atomic import sync
from dovetail.disk.shape import check_shape, data_sha256, file_sha256
from dovetail.disk.tensors import DTYPES
from dovetail.disk.untrusted import Directory
from dovetail.training.storage import Tensors, file_of, read_chunks, write_chunks

CHECKPOINTS = "checkpoints"  # the directory in that of a run
MANIFEST = "manifest.json"
FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.safetensors")
SHAPE = {  # of a manifest
    "numbers": {str: object},
    "tensors": {str: {"dtype": str, "shape": [int], "chunks": [{"file": str, "offset": [int], "shape": [int]}]}},
    "files": {str: {"bytes": int, "sha256": str}},
}


class CheckpointManifest(NamedTuple):
    """What a checkpoint holds."""

    numbers: dict[str, Any]  # plain data: the step, the position of the data, the seed …
    tensors: Tensors
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "sha256"}


class Checkpoints:
    """The checkpoints in a directory. Every rank makes one and calls the same methods in the same order.

    `keep` is the number of complete checkpoints that stay, counted from the one just committed; older ones are deleted.
    """

    def __init__(self, place: str | Path, keep: int = 3, timeout: float | None = None) -> None:
        self.place, self.keep = Path(place), keep
        limit = None if timeout is None else timedelta(seconds=timeout)  # of a collective; torch has a default
        self.group: Any = dist.new_group(backend="gloo", timeout=limit) if dist.is_initialized() else None  # a thread uses it
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Commit a checkpoint. One of this step that verifies stays as it is."""
        self.wait()
        self._commit(step, dict(tensors), dict(numbers))

    def save_later(self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Path:
        """Copy the tensors, and commit the checkpoint in a thread of its own; `wait` and the next save raise its error. Return
        the directory that it will have."""
        self.wait()
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.thread = threading.Thread(target=self._in_thread, args=(step, copies, dict(numbers)), name="checkpoint")
        self.thread.start()
        return self._target(step)

    def wait(self) -> None:
        """Wait for a commit in a thread; raise its error."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies, on every rank the same."""
        return next((path for path in reversed(self.complete()) if self._verifies(path)), None)

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy a checkpoint into the tensors, each rank its shard; return the numbers."""
        manifest = read_manifest(path)
        if missing := sorted(set(tensors) - set(manifest.tensors)):
            raise FileError(f"{path}: holds no {missing[0]}; was the run's spec or optimizer changed?")
        for name, tensor in tensors.items():
            described = manifest.tensors[name]
            if described["shape"] != list(tensor.shape) or DTYPES[described["dtype"]] != tensor.dtype:
                stored = f"{described['dtype']} {described['shape']}"
                raise FileError(f"{path}: {name} is {stored}, the run has {tensor.dtype} {list(tensor.shape)}")
        read_chunks(path, manifest.tensors, tensors)
        return manifest.numbers

    def _verifies(self, path: Path) -> bool:
        """Whether a checkpoint is there and verifies, each rank reading some of its files; a damaged one is warned of."""
        if not all(self._all(path.exists())):
            return False
        bad = None
        try:
            verify(path, self.rank, self._ranks())
        except FileError as error:
            bad = str(error)
        found = [one for one in self._all(bad) if one is not None]
        if found and self.rank == 0:
            warnings.warn(f"{found[0]}; this checkpoint is not used", stacklevel=3)
        return not found

    def _target(self, step: int) -> Path:
        return self.place / f"step-{step:08d}"

    def complete(self) -> list[Path]:
        """The checkpoints with their final names, oldest first."""
        names = os.listdir(self.place) if self.place.is_dir() else []
        return sorted((self.place / name for name in names if NAME.fullmatch(name)), key=step_of)

    # -- a commit -------------------------------------------------------------------------------------------------------

    def _in_thread(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        try:
            self._commit(step, tensors, numbers)
        except BaseException as error:  # raised by `wait`, in the thread that can end the run
            self.failure = error

    @delaying()
    def _commit(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        target = self._target(step)
        fresh = target.with_name(f"{target.name}.tmp")
        if self._verifies(target):
            return
        with self._together(f"{target}: cannot be written"):
            if self.rank == 0:
                self.place.mkdir(parents=True, exist_ok=True)
                for left in self.place.glob("step-*.tmp"):  # by a run that was killed
                    _delete(left, left)
                if target.exists():  # damaged
                    _delete(target, fresh)
                fresh.mkdir()
        try:
            own, described = {}, {}
            with self._together(f"{target}: cannot be written"):
                described = write_chunks(fresh, tensors, self.rank, self._all)
                if (fresh / file_of(self.rank)).exists():
                    own = {file_of(self.rank): _measured(fresh / file_of(self.rank))}
            files = {name: one for some in self._all(own) for name, one in some.items()}
            with self._together(f"{target}: cannot be written"):
                if self.rank == 0:
                    write_manifest(fresh, CheckpointManifest(numbers, described, files))
                    os.rename(fresh, target)
                    sync(self.place)
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(fresh, ignore_errors=True)
            raise
        if self.rank == 0:
            for path in [one for one in self.complete() if step_of(one) <= step][: -self.keep]:  # later ones are damaged
                _delete(path, path.with_name(f"{path.name}.tmp"))

    def _ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def _all(self, value: Any) -> list[Any]:
        """The value of every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self._ranks()
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextlib.contextmanager
    def _together(self, problem: str) -> Iterator[None]:
        """Raise on every rank if one of them fails inside the context."""
        failed: OSError | None = None
        try:
            yield
        except OSError as error:
            failed = error
        errors = [one for one in self._all(None if failed is None else str(failed.strerror)) if one is not None]
        if errors:
            raise FileError(f"{problem}: {errors[0]}") from failed


def step_of(path: Path) -> int:
    """The step that a checkpoint was taken after."""
    found = NAME.fullmatch(path.name)
    if found is None:
        raise FileError(f"{path}: is not a checkpoint; their names are step- and a number of 8 digits")
    return int(found[1])


def verify(path: Path, part: int = 0, parts: int = 1) -> CheckpointManifest:
    """Raise FileError unless the manifest and the files have the checksums they were written with. Of the files, those of one
    part of several may be read."""
    manifest = read_manifest(path)
    for i, (name, expected) in enumerate(sorted(manifest.files.items())):
        file = path / name
        try:
            size = os.lstat(file).st_size
        except OSError as error:
            raise FileError(f"{file}: is missing ({error.strerror})") from error
        if size != expected["bytes"]:
            raise FileError(f"{file}: has {size:,} bytes, {expected['bytes']:,} were written")
        if i % parts == part and file_sha256(file) != expected["sha256"]:
            raise FileError(f"{file}: is damaged: its sha256 is not the one that was written")
    return manifest


def read_manifest(path: Path) -> CheckpointManifest:
    """Read and check the manifest of a checkpoint."""
    data = Directory(path).json(MANIFEST, JSON_BYTES)
    checksum = data.pop("sha256", None)
    if checksum != data_sha256(data) or data.get("format") != FORMAT:
        raise FileError(f"{path / MANIFEST}: is damaged: its sha256 is not the one that was written")
    check_shape(data, SHAPE, str(path / MANIFEST))
    manifest = CheckpointManifest(data["numbers"], data["tensors"], data["files"])
    if not all(FILE.fullmatch(name) for name in manifest.files):
        raise FileError(f"{path / MANIFEST}: names a file that no rank writes")
    for name, one in manifest.tensors.items():
        if one["dtype"] not in DTYPES or not all(chunk["file"] in manifest.files for chunk in one["chunks"]):
            raise FileError(f"{path / MANIFEST}: {name[:80]} has an unknown dtype, or chunks in a file that is not listed")
    return manifest


def write_manifest(place: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest into a checkpoint that is otherwise complete, and sync it and its directory."""
    data = {"format": FORMAT, **manifest._asdict()}
    text = json.dumps({**data, "sha256": data_sha256(data)}, indent=1)
    with (place / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(place)


def _delete(path: Path, name: Path) -> None:
    """Delete a directory, under a name that no checkpoint has; one that cannot be deleted stays, with a warning."""
    try:
        os.rename(path, name)  # a half-deleted checkpoint must not look like a complete one
        shutil.rmtree(name)
    except OSError as error:
        warnings.warn(f"{name if name.exists() else path}: cannot be deleted ({error.strerror}); delete it", stacklevel=4)


def _measured(file: Path) -> dict[str, Any]:
    """Sync a file; return its size and checksum."""
    sync(file)
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
