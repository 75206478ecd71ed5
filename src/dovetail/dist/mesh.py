"""The ranks of a run: how this process joins the others, and how they are laid out.

    data       each rank reads other rows; weights are cut over these ranks by FSDP, and gathered where they are used
    sequence   each rank holds another piece of every row
    tensor     each rank holds other heads, other hidden units

`mesh["tensor"]` is the row of ranks along one axis. With torchrun the environment says who this process is; without it, it
is alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dovetail.core.errors import DovetailError

AXES = ("data", "sequence", "tensor")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class RankError(DovetailError):
    """Processes that should work together do not: a wrong number of them, one that died or does not answer."""


@contextmanager
def joined_ranks(device: str = "cpu") -> Iterator[None]:
    """Within this context the process is one of the ranks that torchrun started, or one alone."""
    if device not in BACKENDS:
        raise RankError(f"no way of talking between ranks is known for {device!r} (known: {', '.join(BACKENDS)})")
    if dist.is_initialized():  # the caller has joined already, and leaves himself
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(BACKENDS[device])
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  documented, if not listed
        dist.init_process_group(BACKENDS[device], store=alone, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(*, data: int = 1, sequence: int = 1, tensor: int = 1, device: str = "cpu") -> DeviceMesh:
    """All ranks as a box of data × sequence × tensor; neighbors share tensors, which talk most."""
    sizes = (data, sequence, tensor)
    world = dist.get_world_size()
    if min(sizes) < 1 or data * sequence * tensor != world:
        box = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise RankError(f"{box} is not the number of processes, {world} (start as many as the product says)")
    return init_device_mesh(device, sizes, mesh_dim_names=AXES)
