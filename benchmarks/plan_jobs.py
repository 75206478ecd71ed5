"""What ranks do in the benchmark of plans: train for some steps, counted, timed, or with their memory measured."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.planning.trace import Setting, fake_batch, watch_step
from dovetail.planning.watch import Watch
from dovetail.training.objective import next_token
from dovetail.training.ranks import JobRanks
from dovetail.training.step import DTYPES, Trainer

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
TINY = "width: 32\nvocab: 64\nhead: {kind: lm, tied: false}\nlayers: [{repeat: 4, mixer: {heads: 4}, ffn: {hidden: 64}}]\n"


def trainer_of(text: str, layout: Layout, setting: Setting) -> Trainer:
    """A trainer as `dovetail train` makes it."""
    ranks = JobRanks(dist.get_rank(), layout)
    model = ranks.build(from_yaml(text), 0, DTYPES[setting.precision])
    return Trainer(model, next_token, setting.plan(setting.micro_batches), ranks)


def counted(text: str, layout: Layout, setting: Setting) -> dict[str, Any]:
    """The parameters of this rank, and (kind, ranks, stride) -> bytes of the collectives of a step, on real tensors."""
    for _ in range(2):  # the first step derives shapes
        ranks = JobRanks(dist.get_rank(), layout)
        model = ranks.build(from_yaml(text), 0, DTYPES[setting.precision])
        found = watch_step(model, ranks, setting, Watch())
    sent = {(kind, *group): traffic.bytes for (kind, group), traffic in found.cost.traffic.items()}
    return {"parameters": found.parameters, "sent": sent}


def timed(text: str, layout: Layout, setting: Setting, steps: int) -> list[float]:
    """The seconds of some steps, after two."""
    trainer, batch = trainer_of(text, layout, setting), fake_batch(setting.rows * setting.micro_batches, setting.length)
    found: list[float] = []
    for step in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        trainer.step(batch, step, 1e-4)
        found.append(time.perf_counter() - begin)
    return found[2:]


def memory(text: str, layout: Layout, setting: Setting) -> int:
    """The most resident memory of this process while it builds the model and trains for three steps, beyond what it had: a tiny
    model is trained first, so that code and buffers of the process group do not count."""
    return_memory()
    tiny = Setting(1, 32, setting.micro_batches, setting.precision, setting.recompute)
    for step in range(2):
        trainer_of(TINY, layout, tiny).step(fake_batch(setting.micro_batches, 32), step, 1e-4)
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status("VmRSS")
    trainer = trainer_of(text, layout, setting)
    batch = fake_batch(setting.rows * setting.micro_batches, setting.length)
    for step in range(3):
        trainer.step(batch, step, 1e-4)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Bytes of one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def return_memory() -> None:
    """Make the allocator of this process return freed memory of 64 KB and more at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    libc.mallopt(M_TRIM_THRESHOLD, 2**16)


def cores() -> int:
    """The number of cores of this machine."""
    return len(os.sched_getaffinity(0))
