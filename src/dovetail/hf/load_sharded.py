"""Load a checkpoint over the ranks of a mesh; no rank ever holds more than its shard.

    mesh = make_mesh(data=2, tensor=2)
    model = load_sharded("llama-405b", mesh)                   meta -> shard -> allocate -> copy tensor[slices], one at a time

Every rank maps the files and copies its slice of each tensor. Pages of a mapped file are not memory of the process, and what a
rank does not copy is not read. A tensor that the family lays out differently (a fused q, k, v) is converted whole, one at a
time, before the slice is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from dovetail.hf.load import Watch, opened
from dovetail.hf.tensors import warn_dropped
from dovetail.model.construction import set_constants
from dovetail.model.transformer import Transformer
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import allocate, local, shard_on_meta


def load_sharded(
    directory: str | Path,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    whole: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    watch: Watch | None = None,
) -> Transformer:
    """Load the model of a directory over the ranks of a mesh (`make_mesh`), in evaluation mode; every rank calls it.

    All weights get one dtype, as FSDP requires: `dtype`, or the one that most bytes of the files have. `whole` and
    `compute_dtype` are those of `build_sharded`; `watch` is called with the bytes read so far.
    """
    with opened(directory, watch) as files:
        kind = dtype or files.dtype
        model, slices = shard_on_meta(files.spec, mesh, dtype=kind, whole=whole, compute_dtype=compute_dtype)
        allocate(model, files.spec, device)
        with torch.no_grad():
            for path, tensor in files.tensors:
                local(tensor_at(model, path)).copy_(tensor[slices[path]])
    set_constants(model, files.spec, kind, device, slices)
    warn_dropped(files.dropped)
    return model
