"""The chunks of a checkpoint: who writes which, where they are, and which of them a rank reads back.

    rank-00000.safetensors       name@0,128 -> the chunk of `name` that begins at (0, 128)

The planners of torch.distributed.checkpoint decide which rank writes which chunk of which tensor, each once, and which pieces
of which chunks make up the shards that a rank holds when it loads, whatever the number of ranks was. Chunks are written as
safetensors files, one per rank: no pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from dovetail.base.errors import FileError
from dovetail.disk.tensors import DTYPE_NAMES, DTYPES, TensorFile, write_tensors

Tensors = dict[str, dict[str, Any]]  # name -> {"dtype", "shape", "chunks": [{"file", "offset", "shape"}]}
Gather = Callable[[Any], list[Any]]  # a value -> that of every rank


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_chunks(place: Path, tensors: Mapping[str, Tensor], rank: int, gather: Gather) -> Tensors:
    """Write the chunks of this rank; return the description of all chunks. A tensor that several ranks hold is written once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, is_coordinator=True)
    plans, metadata = planner.create_global_plan(gather(planner.create_local_plan()))  # every rank computes the same
    plan = planner.finish_plan(plans[rank])
    chunks = {_key(item.index): _chunk(planner.resolve_data(item)) for item in plan.items}
    if chunks:
        write_tensors(place / file_of(rank), chunks, chunks.items())
    return _described(plans, metadata)


def read_chunks(place: Path, described: Tensors, tensors: Mapping[str, Tensor]) -> None:
    """Copy into the tensors, or this rank's shards of them, what the chunks hold."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata(described), is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    files = {(name, tuple(chunk["offset"])): chunk["file"] for name, one in described.items() for chunk in one["chunks"]}
    by_file: dict[str, list[Any]] = {}
    for item in plan.items:
        by_file.setdefault(files[item.storage_index.fqn, tuple(item.storage_index.offset or ())], []).append(item)
    for name, items in by_file.items():
        with TensorFile(place / name, place / name) as file:
            for item in items:
                key = _key(item.storage_index)
                if key not in file.entries:
                    raise FileError(f"{place / name}: holds no {key}")
                chunk = file.read(key)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    chunk = chunk.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(chunk)
                planner.commit_tensor(item, target)


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _chunk(data: Any) -> Tensor:
    assert isinstance(data, Tensor), "every entry of a checkpoint is a tensor"
    return data.detach()


def _described(plans: list[SavePlan], metadata: Metadata) -> Tensors:
    """Every tensor with its chunks and their files."""
    files = {
        (item.index.fqn, tuple(item.index.offset or ())): file_of(rank)
        for rank, plan in enumerate(plans)
        for item in plan.items
    }
    described: Tensors = {}
    for name, one in metadata.state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata), "every entry of a checkpoint is a tensor"
        chunks = [
            {"file": files[name, tuple(chunk.offsets)], "offset": list(chunk.offsets), "shape": list(chunk.sizes)}
            for chunk in one.chunks
        ]
        described[name] = {"dtype": DTYPE_NAMES[one.properties.dtype], "shape": list(one.size), "chunks": chunks}
    return described


def _metadata(described: Tensors) -> Metadata:
    found: dict[str, Any] = {}
    for name, one in described.items():
        chunks = [ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["shape"])) for c in one["chunks"]]
        found[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[one["dtype"]]), torch.Size(one["shape"]), chunks)
    return Metadata(found)
