"""Initial weights that each rank computes alone, against the shards of the whole model: a part of law 8.

build_sharded(spec, mesh)     meta -> shard -> allocate and fill the local shard          no rank holds the whole
build(spec) -> shard          the whole model on every rank, of which torch takes the shard
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from dovetail.construction import build
from dovetail.core.module import tensor_at
from dovetail.model import Model
from dovetail.parallel.construction import build_sharded, local
from dovetail.parallel.shard import fully_shard_model, tensor_parallel


def initial_gaps(spec: Model, seed: int, mesh: DeviceMesh) -> dict[str, float]:
    """The largest difference of any parameter or buffer of this rank; infinite where a shape, a dtype or a value differs."""
    alone, whole = build_sharded(spec, mesh, seed=seed), build(spec, seed=seed)
    if mesh["tensor"].size() > 1:
        tensor_parallel(whole, spec, mesh["tensor"])
    if mesh["data"].size() > 1:
        fully_shard_model(whole, mesh["data"])
    gaps: dict[str, float] = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        got, want = local(tensor_at(alone, name)), local(tensor)
        same = got.dtype == want.dtype and torch.equal(got, want)
        gaps[f"initial {name}"] = 0.0 if same else float("inf")
    return gaps
