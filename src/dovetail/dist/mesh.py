"""The ranks of a run: joining the process group, and the device mesh.

    data       each rank reads other rows; FSDP shards weights across these ranks and gathers them for use
    sequence   each rank holds another chunk of every row
    tensor     each rank holds other heads, other hidden units

`mesh["tensor"]` is the row of ranks along one axis. With torchrun the environment names the rank of this process; without it,
there is one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dovetail.core.errors import DovetailError

AXES = ("data", "sequence", "tensor")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class RankError(DovetailError):
    """The ranks of a run failed: a wrong number of them, one that died or does not respond."""


@contextmanager
def joined_ranks(device: str = "cpu", timeout: float | None = None) -> Iterator[None]:
    """Within this context the process is a rank of the torchrun job, or the only rank. A collective that takes longer than
    `timeout` seconds fails; torch has a default."""
    if device not in BACKENDS:
        raise RankError(f"no way of talking between ranks is known for {device!r} (known: {', '.join(BACKENDS)})")
    if dist.is_initialized():  # the caller has initialized the process group and destroys it
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(BACKENDS[device], timeout=None if timeout is None else timedelta(seconds=timeout))
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  documented, if not listed
        dist.init_process_group(BACKENDS[device], store=alone, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(*, data: int = 1, sequence: int = 1, tensor: int = 1, device: str = "cpu") -> DeviceMesh:
    """Return the mesh data × sequence × tensor; tensor-parallel ranks, which communicate most, are adjacent."""
    sizes = (data, sequence, tensor)
    world = dist.get_world_size()
    if min(sizes) < 1 or data * sequence * tensor != world:
        box = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise RankError(f"{box} is not the number of processes, {world} (start as many as the product says)")
    return init_device_mesh(device, sizes, mesh_dim_names=AXES)
