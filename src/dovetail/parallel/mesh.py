"""The ranks of a run: joining the process group, and the device mesh.

    pipeline   each rank holds other layers
    replicas   each rank reads other rows, and holds the same weights
    data       each rank reads other rows; FSDP shards weights across these ranks and gathers them for use
    sequence   each rank holds another chunk of every row; FSDP shards weights across these ranks, too
    tensor     each rank holds other heads, other hidden units

`mesh["tensor"]` is the row of ranks along one axis. With torchrun the environment names the rank of this process; without it,
there is one rank.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.rendezvous import rendezvous

from dovetail.base.errors import DovetailError
from dovetail.parallel.layout import Layout

AXES = ("pipeline", "replicas", "data", "sequence", "tensor")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DUMPS = "TORCH_FR_DUMP_TEMP_FILE"
FLIGHT_RECORDER = {  # of NCCL: the last collectives of every rank, written to a file when one of them times out
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    DUMPS: "/tmp/dovetail-flight-recorder-rank-",
}
# it advises to flatten the mesh for the norm of all gradients, which is two all-reduces of one number
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class RankError(DovetailError):
    """The ranks of a run failed: a wrong number of them, one that died or does not respond."""


@contextmanager
def joined_ranks(device: str = "cpu", timeout: float | None = None) -> Iterator[None]:
    """Within this context the process is a rank of the torchrun job, or the only rank. A collective that takes longer than
    `timeout` seconds fails; torch has a default."""
    if device not in BACKENDS:
        raise RankError(f"no backend for communication between ranks is known for {device!r} (known: {', '.join(BACKENDS)})")
    if dist.is_initialized():  # the caller has initialized the process group and destroys it
        yield
        return
    if device == "cuda":
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        limit = None if timeout is None else timedelta(seconds=timeout)
        store, rank, world = next(rendezvous("env://", timeout=limit or default_pg_timeout))
        dist.init_process_group(BACKENDS[device], store=_of_attempt(store), rank=rank, world_size=world, timeout=limit)
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  documented, if not listed
        dist.init_process_group(BACKENDS[device], store=alone, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _of_attempt(store: Store) -> Store:
    """Return the store without the keys of earlier attempts of torchrun --max-restarts. It lives in the launcher, and a rank
    that finds the address of a dead rank there waits for it. Launchers on several machines count restarts differently: there
    torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def set_timeouts(seconds: float) -> None:
    """Set the time-out of every group of ranks that there is. Those of a mesh begin with torch's default, half an hour for
    gloo, whatever the default group has."""
    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(seconds=seconds), group)


def make_mesh(
    *, pipeline: int = 1, replicas: int = 1, data: int = 1, sequence: int = 1, tensor: int = 1, device: str = "cpu"
) -> DeviceMesh:
    """Return the mesh pipeline × replicas × data × sequence × tensor; tensor-parallel ranks, which communicate most, are
    adjacent."""
    sizes = (pipeline, replicas, data, sequence, tensor)
    world = dist.get_world_size()
    if min(sizes) < 1 or math.prod(sizes) != world:
        box = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise RankError(f"{box} is not the number of processes, {world} (start as many as the product says)")
    return init_device_mesh(device, sizes, mesh_dim_names=AXES)


def mesh_of(layout: Layout, device: str = "cpu") -> DeviceMesh:
    """Return the mesh of a layout."""
    sizes = {"pipeline": layout.pipeline, "replicas": layout.replicas, "data": layout.shards}
    return make_mesh(**sizes, sequence=layout.sequence, tensor=layout.tensor, device=device)


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of FSDP: data × sequence as one axis; behind that of replicas, where there are several."""
    shards = mesh["data"] if mesh["sequence"].size() == 1 else mesh["data", "sequence"]._flatten("shards")
    return shards if mesh["replicas"].size() == 1 else DeviceMesh._concatenate([mesh["replicas"], shards])


def rows_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks that have other rows of a batch, and are equal in all else."""
    return (mesh["data"] if mesh["replicas"].size() == 1 else mesh["replicas", "data"]._flatten("rows")).get_group()
