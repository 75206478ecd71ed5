"""Build a model of which each rank allocates its own shard alone.

    mesh = make_mesh(data=2, tensor=2)
    model = build_sharded(spec, mesh, seed=3)                  meta -> shard -> allocate and initialize the local shard

Modules are built on the meta device, which has no memory. Tensor parallelism and FSDP shard them there. Only then does a rank
allocate its shard of each tensor, and fills it with the values that the whole model `build(spec, seed=3)` has at the same
indices, bit for bit: an initial value is a function of (seed, path, index).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dovetail.model.construction import fill_slice, on_meta, set_constants, tie
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import held
from dovetail.nn.module import tensor_at
from dovetail.parallel.context import SequenceRanks
from dovetail.parallel.mesh import rows_group, weights_mesh
from dovetail.parallel.placement import local_slices
from dovetail.parallel.shard import fully_shard_model, run_with, tensor_parallel
from dovetail.parallel.stage import LayerStage, keep_stage


class Sharded(NamedTuple):
    """A model and, by path, the slice that this rank holds of every declared tensor; of a pipeline stage, those of its
    layers."""

    model: Transformer
    slices: dict[str, tuple[slice, ...]]


def build_sharded(
    spec: Model,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    whole: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    ring: bool = False,
    prepare: Callable[[Transformer], Any] | None = None,
) -> Transformer:
    """Build a model over the ranks of a mesh (`make_mesh`), in evaluation mode; no rank ever holds more than its shard.

    `whole` names axes that tensor parallelism does not shard; `compute_dtype` is what FSDP's layers compute in, if not `dtype`;
    with `ring`, keys and values of a split sequence go round the ranks (parallel/ring.py). `prepare` is called with the model
    on the meta device, before it is sharded: it may attach adapters.
    """
    model, slices = shard_on_meta(spec, mesh, dtype=dtype, whole=whole, compute_dtype=compute_dtype, ring=ring, prepare=prepare)
    allocate(model, spec, device)
    set_constants(model, spec, dtype, device, slices)
    with torch.no_grad():
        for d in held(model, spec):
            if d.weight.stored:
                fill_slice(d, seed, slices[d.path], local(tensor_at(model, d.path)))
    return model


def shard_on_meta(
    spec: Model,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    whole: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    ring: bool = False,
    prepare: Callable[[Transformer], Any] | None = None,
) -> Sharded:
    """Build a model on the meta device and shard it there: a pipeline stage of it, tensor parallelism, a split sequence, then
    FSDP, each where the mesh has several ranks for it."""
    tensor, sequence, weights = mesh["tensor"], mesh["sequence"], weights_mesh(mesh)
    chunks = (
        None if sequence.size() == 1 else SequenceRanks(spec, sequence.get_group(), ring)
    )  # raises before anything is built
    stage = (
        None
        if mesh["pipeline"].size() == 1
        else LayerStage.of(spec, mesh["pipeline"].get_local_rank(), mesh["pipeline"].size())
    )
    model = on_meta(spec, dtype)
    if stage is not None:
        keep_stage(model, stage)
    if prepare is not None:
        prepare(model)
    stored = {} if tensor.size() == 1 else tensor_parallel(model, spec, tensor, whole).stored
    if chunks is not None:
        run_with(model, chunks)
    if weights.size() > 1 or compute_dtype is not None:
        fully_shard_model(model, weights, compute_dtype, rows_group(mesh))
    by_tensor, by_data = (tensor.get_local_rank(), tensor.size()), (weights.get_local_rank(-1), weights.size(-1))
    slices = {
        d.path: local_slices(
            d.weight.shape(d.scope), stored.get(d.path), by_tensor, (0, 1) if d.weight.buffer else by_data
        )  # FSDP does not shard buffers
        for d in held(model, spec)
    }
    return Sharded(model, slices)


def allocate(model: nn.Module, spec: Model, device: str | torch.device) -> None:
    """Allocate this rank's shard of every tensor on the device, without values; tied weights stay one parameter."""
    model.to_empty(device=device)
    tie(model, spec)


def full(tensor: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as a whole, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the tensor that this rank stores of a parameter or buffer."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
