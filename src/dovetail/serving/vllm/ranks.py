"""The modules of a spec on one of vLLM's tensor-parallel ranks: built on the meta device, sharded there, then allocated.

    k.weight (kv_heads·head, embed)  ->  rows of this rank's KV heads          how each tensor is sharded: parallel/placement.py

A rank allocates its own shard alone, and copies its slice of each stored tensor. Heads, KV heads, slopes, sinks and recurrent
states are then those of the rank. Sums over ranks are taken in vLLM's process group.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dovetail.construction import on_meta, set_constants
from dovetail.core.declared_tensors import held
from dovetail.model import Model
from dovetail.parallel.construction import allocate
from dovetail.parallel.placement import local_slices
from dovetail.parallel.shard import TensorRanks, tensor_parallel
from dovetail.serving.can_serve import whole_axes
from dovetail.transformer import Transformer


class Shard(NamedTuple):
    """The modules on one rank, and by path the slice that it holds of every declared tensor."""

    model: Transformer
    slices: dict[str, tuple[slice, ...]]
    ranks: TensorRanks | None  # None: there is one

    @property
    def cuts(self) -> dict[str, int]:
        """The axes that are sharded, and into how many shards."""
        return {} if self.ranks is None else self.ranks.cuts

    def run(self) -> AbstractContextManager[None]:
        """Within this context modules read the weights of this rank."""
        return nullcontext() if self.ranks is None else self.ranks.run()


def build_shard(spec: Model, dtype: torch.dtype, device: torch.device, tp: int) -> Shard:
    """Build the modules of a spec on this rank of `tp`, without values of the weights."""
    model, ranks = on_meta(spec, dtype), None
    if tp > 1:
        from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

        mesh = DeviceMesh.from_group(get_tp_group().device_group, device.type)
        ranks = tensor_parallel(model, spec, mesh, whole_axes(spec, tp))
    stored, rank = ({}, (0, 1)) if ranks is None else (ranks.stored, (ranks.rank, ranks.count))
    slices = {d.path: local_slices(d.weight.shape(d.scope), stored.get(d.path), rank) for d in held(model, spec)}
    allocate(model, spec, device)
    set_constants(model, spec, dtype, device, slices)
    return Shard(model, slices, ranks)
