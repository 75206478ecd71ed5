"""Faults of checkpoints: kills within a save, flipped bits, truncated files, a full disk (rows of benchmarks/faults.py)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from faults_process import SPEC, Run, in_child, make_home, on_ranks, results
from measure import Goal, Row
from torch.distributed.tensor import DTensor

from dovetail.base.errors import FileError
from dovetail.data.corpus import Batch
from dovetail.disk import replace, shape, tensors
from dovetail.files.spec import from_yaml
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.construction import local
from dovetail.parallel.layout import Layout
from dovetail.training import checkpoint, storage
from dovetail.training.checkpoint import MANIFEST, Checkpoints, step_of, verify
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.ranks import JobRanks
from dovetail.training.step import Trainer

LINES = {module.__file__ for module in (checkpoint, storage, tensors, replace, shape)}  # of a save
NEWNS, NEWUSER, PRIVATE, REMOUNT = 0x20000, 0x10000000, 0x44000, 0x20  # of unshare(2) and mount(2)
NOBODY = 65534
LARGE = SPEC.replace("width: 64", "width: 128").replace("head: 16", "head: 32").replace("hidden: 172", "hidden: 512")


def state(seed: int = 0, steps: int = 0, tensor: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of the tiny model after some steps, sharded across the ranks; `tensor` of them share each layer."""
    layout = Layout.of(dist.get_world_size(), tensor=tensor) if dist.is_initialized() else Layout()
    ranks = JobRanks(dist.get_rank() if layout.ranks > 1 else 0, layout)
    trainer = Trainer(ranks.build(from_yaml(SPEC), seed=seed), next_token, Plan(steps=9), ranks)
    tokens = torch.randint(0, 512, (12, 17), generator=torch.Generator().manual_seed(3))
    tokens = tokens[ranks.data_rank :: ranks.data_count]
    for step in range(steps):
        trainer.step(Batch(tokens[:, :-1], tokens[:, 1:], TokenLayout.whole(len(tokens), 16)), step, 1e-3)
    return trainer.tensors()


# -- C1 -----------------------------------------------------------------------------------------------------------------


def c1(place: Path, points: int = 40) -> list[Row]:
    """SIGKILL one of two ranks at points through a save, in the thread that trains and in one of its own."""
    rows = list[Row]()
    for later in (False, True):
        where = place / f"later-{later}"
        lines = results(on_ranks(2, save_and_die, str(where), 1, None, later))  # counts the lines of a save
        loaded = partial = new = 0
        for i in range(points):
            rank = i % 2
            at = max(1, int((i + 0.5) / points * lines[rank]["lines"]))
            ended = on_ranks(2, save_and_die, str(where), i + 2, (rank, at), later)
            if ended[rank].code != -signal.SIGKILL:
                raise SystemExit(f"rank {rank} ended with {ended[rank].code} instead of being killed at line {at}")
            complete = max(step_of(path) for path in Checkpoints(where).complete())
            new += complete == i + 2
            found = results(on_ranks(2, restart, str(where)))  # on other processes, as after a restart
            loaded += all(one["step"] == complete and one["equal"] for one in found)
            partial += any(one["step"] is not None and not one["equal"] for one in found)
        how = "in a thread" if later else "at once"
        kills = f"of {points} kills through a save {how}"
        rows += [
            Row(f"C1 restarts that load the last complete step, {kills}", loaded, Goal(low=points)),
            Row(f"C1 restarts that load a partial checkpoint, {kills}", partial, Goal(high=0)),
            Row(f"C1 kills after the commit, {kills}", new),
        ]
    return rows


def save_and_die(place: str, step: int, death: tuple[int, int] | None, later: bool) -> dict[str, int]:
    """Save a checkpoint whose values tell its step; this rank may be killed at a line of the save."""
    mine = death is not None and death[0] == dist.get_rank()
    checkpoints, values, count = Checkpoints(place, keep=2), state(), [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in LINES:
            return None
        count[0] += 1
        if mine and death is not None and count[0] >= death[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def commit(*args: Any) -> None:
        sys.settrace(trace)
        try:
            Checkpoints._commit(checkpoints, *args)
        finally:
            sys.settrace(None)

    for i, value in enumerate(values.values()):
        local(value).fill_(step + i / 1000)
    checkpoints._commit = commit  # type: ignore[attr-defined]
    (checkpoints.save_later if later else checkpoints.save)(step, values, {"step": step})
    checkpoints.wait()
    return {"lines": count[0]}


def restart(place: str) -> dict[str, Any]:
    """Load the latest checkpoint; its step, and whether every value is of it."""
    checkpoints, values = Checkpoints(place, keep=2), state()
    path = checkpoints.latest()
    if path is None:
        return {"step": None, "equal": False}
    numbers = checkpoints.load(path, values)
    expected = [torch.tensor(numbers["step"] + i / 1000) for i in range(len(values))]
    equal = all(bool((local(value) == one).all()) for value, one in zip(values.values(), expected, strict=True))
    return {"step": step_of(path), "equal": equal and numbers["step"] == step_of(path)}


# -- C3, C4, C6 ---------------------------------------------------------------------------------------------------------


def saved_by(place: str, tensor: int, *steps: int) -> dict[str, str]:
    """Train and save; the sha256 of every tensor, whole."""
    checkpoints, values = Checkpoints(place, keep=9), state(steps=2, tensor=tensor)
    for step in steps:
        checkpoints.save(step, values, {"step": step})
    return digests(values)


def loaded_by(place: str, tensor: int = 1) -> dict[str, str]:
    """Load into a model of other initial weights; the sha256 of every tensor, whole."""
    checkpoints, values = Checkpoints(place), state(seed=1, tensor=tensor)
    path = checkpoints.latest()
    assert path is not None
    checkpoints.load(path, values)
    return digests(values)


def digests(values: dict[str, torch.Tensor]) -> dict[str, str]:
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}
    return {name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for name, value in whole.items()}


def c3(place: Path, flips: int = 200) -> list[Row]:
    """Single bits of shards and manifest, flipped."""
    results(on_ranks(2, saved_by, str(place / "c"), 1, 1, 2))
    found = in_child(_flip_bits, str(place / "c"), flips)
    name = f"C3 flipped bits of shards and manifest detected before use, of {flips}"
    return [Row(name, found["detected"], Goal(low=flips)), Row("C3 of these, in the manifest", found["manifest"])]


def _flip_bits(place: str, flips: int) -> dict[str, int]:
    rng, checkpoints = random.Random(5), Checkpoints(place)
    older, newest = checkpoints.complete()
    found = {"detected": 0, "manifest": 0}
    for _ in range(flips):
        file = rng.choice(sorted(newest.iterdir()))
        good, bit = file.read_bytes(), rng.randrange(8 * file.stat().st_size)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["detected"] += checkpoints.latest() == older
        found["manifest"] += file.name == MANIFEST
        file.write_bytes(good)
    assert checkpoints.latest() == newest
    return found


def c4(place: Path) -> list[Row]:
    """Truncated files."""
    results(on_ranks(2, saved_by, str(place / "c"), 1, 1))
    cases, named, slowest = in_child(_truncate, str(place / "c" / "step-00000001"))
    return [
        Row(f"C4 truncations refused by a FileError that names the file, of {cases}", named, Goal(low=cases)),
        Row("C4 seconds of the slowest", slowest, Goal(high=1)),
    ]


def _truncate(place: str) -> tuple[int, int, float]:
    cases, named, slowest = 0, 0, 0.0
    for file in sorted(Path(place).iterdir()):
        data = file.read_bytes()
        header = len(data) // 2 if file.name == MANIFEST else 8 + int.from_bytes(data[:8], "little")
        for size in (0, 7, 8, header, len(data) - 1):
            file.write_bytes(data[:size])
            cases, begin = cases + 1, time.perf_counter()
            try:
                verify(Path(place))
            except FileError as error:
                named += file.name in str(error)
            slowest = max(slowest, time.perf_counter() - begin)
        file.write_bytes(data)
    return cases, named, slowest


def c6(place: Path, ranks: int = 4, others: tuple[int, ...] = (1, 2, 3)) -> list[Row]:
    """Saved on some ranks, loaded on others."""
    saved = results(on_ranks(ranks, saved_by, str(place / "c"), 1, 1))[0]
    rows = list[Row]()
    for count in others:
        loaded = results(on_ranks(count, loaded_by, str(place / "c")))
        differing = sum(one[name] != value for one in loaded for name, value in saved.items())
        name = f"C6 saved on {ranks} ranks, loaded on {count}: of {len(saved)} tensors, differing"
        rows.append(Row(name, differing, Goal(high=0)))
    return rows


# -- C5, C11 ------------------------------------------------------------------------------------------------------------


def c5(place: Path, free: int = 8) -> list[Row]:
    """A file system with too little room for the second checkpoint: the run ends; with more room it continues."""
    home = make_home(place)
    (home / "large.yaml").write_text(LARGE)
    found = in_child(_full_disk, str(home), free)
    size = found["bytes"] / 2**20
    return [
        Row(f"C5 {free} MB free, a checkpoint of {size:.1f} MB: exit code", found["code"], Goal(4, 4)),
        Row("C5 the old checkpoint verifies, and is the only directory", found["intact"], Goal(low=1)),
        Row("C5 exit code of the same command with more room", found["again"], Goal(high=0)),
    ]


def _full_disk(home: str, free: int) -> dict[str, Any]:
    run = Run(Path(home), "disk/run", 4, spec="large.yaml")
    disk = Path(home) / "disk"
    disk.mkdir()
    root = os.getuid() == 0
    _call("unshare", NEWNS | (0 if root else NEWUSER))  # in a user namespace no mount needs privileges
    _call("mount", b"none", b"/", None, PRIVATE, None)
    _mount(disk, 2**40, 0)
    _expect_first(run)
    first = Checkpoints(run.place / "checkpoints").complete()
    used = os.statvfs(disk)
    taken = (used.f_blocks - used.f_bfree) * used.f_frsize
    _mount(disk, taken + free * 2**20, REMOUNT)
    (code,) = run.finish()
    left = sorted(os.listdir(run.place / "checkpoints"))
    verify(first[-1])
    size = sum(file.stat().st_size for file in first[-1].iterdir())
    _mount(disk, 2**40, REMOUNT)
    (again,) = run.finish()
    return {"code": code, "intact": left == [first[-1].name], "again": again, "bytes": size}


def _expect_first(run: Run) -> None:
    if run.finish({"interrupt": 1}) != [130]:
        raise SystemExit(run.errors()[-3000:])


def _mount(disk: Path, size: int, flags: int) -> None:
    _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", flags, f"size={size}".encode())


def _call(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def c11(place: Path, saves: int = 9, keep: int = 3) -> list[Row]:
    """Directories that cannot be deleted: the process has no permission."""
    place.chmod(0o755)  # so that another user may enter it
    (place / "c").mkdir()
    if os.getuid() == 0:
        os.chown(place / "c", NOBODY, NOBODY)
    good, warned = in_child(_cannot_delete, str(place / "c"), saves, keep)
    name = f"C11 keep {keep}, deletions fail: saves after which the newest is there and verifies, of {saves}"
    return [Row(name, good, Goal(low=saves)), Row("C11 warnings", warned, Goal(low=1))]


def _cannot_delete(place: str, saves: int, keep: int) -> tuple[int, int]:
    checkpoints, values, good = Checkpoints(place, keep), state(), 0
    if os.getuid() == 0:  # no permission is refused to root
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, saves + 1):
            checkpoints.save(step, values, {"step": step})
            newest = checkpoints.latest()
            good += newest is not None and step_of(newest) == step
            (Path(place) / f"step-{step:08d}").chmod(0o555)  # its files cannot be deleted
    os.seteuid(os.getuid())  # this process writes its result
    return good, len([one for one in caught if "cannot be deleted" in str(one.message)])
