"""What ranks do in the tests of sharded construction: the model that each rank builds alone, against the whole one."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.hf.load_sharded import load_sharded
from dovetail.model.construction import build
from dovetail.nn.module import tensor_at
from dovetail.parallel.construction import build_sharded, local
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.shard import fully_shard_model, tensor_parallel
from dovetail.spec.fold import declared

SEED = 5


def built(spec_yaml: str, data: int, tensor: int, dtype: str = "float32") -> dict[str, Any]:
    """The sharded model against the whole one: names of tensors with another value, ties, bytes, and the output of a run."""
    spec, mesh, kind = from_yaml(spec_yaml), make_mesh(data=data, tensor=tensor), getattr(torch, dtype)
    model, whole = build_sharded(spec, mesh, seed=SEED, dtype=kind), build(spec, seed=SEED, dtype=kind)
    later = build(spec, seed=SEED, dtype=kind)  # whole first, sharded after
    if tensor > 1:
        tensor_parallel(later, spec, mesh["tensor"])
    if data > 1:
        fully_shard_model(later, mesh["data"])
    different = []
    for name, want in whole.named_parameters():
        got = model.get_parameter(name)
        gathered = got.full_tensor() if isinstance(got, DTensor) else got
        if gathered.dtype != want.dtype or not torch.equal(gathered, want):
            different.append(name)
    for name, want in [*later.named_buffers(), *((n, local(p)) for n, p in later.named_parameters())]:
        got = local(tensor_at(model, name))
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            different.append(f"local {name}")
    ties = [
        d.path
        for d in declared(spec)
        if d.weight.same_as is not None and tensor_at(model, d.path) is not tensor_at(model, d.weight.same_as)
    ]
    inputs = torch.arange(2 * 6).view(2, 6)
    with torch.no_grad():
        source = {} if spec.encoder is None else {"source": inputs}
        gap = (model(inputs, **source) - later(inputs, **source)).abs().max().item()
    return {
        "different": different,
        "untied": ties,
        "same names": list(model.state_dict()) == list(whole.state_dict()),
        "gap": gap,
        "meta": [name for name, p in (*model.named_parameters(), *model.named_buffers()) if local(p).is_meta],
        "values": sum(local(p).numel() for p in model.parameters()),
        "values whole": sum(p.numel() for p in whole.parameters()),
        "rank": dist.get_rank(),
    }


def loaded(directory: str, data: int, tensor: int, dtype: str | None = None) -> dict[str, Any]:
    """The checkpoint that each rank loads alone, against the whole one: names of tensors with another value, and ties."""
    whole = load(directory)
    kind = None if dtype is None else getattr(torch, dtype)
    model = load_sharded(directory, make_mesh(data=data, tensor=tensor), dtype=kind)
    different = []
    for name, want in whole.named_parameters():
        got = model.get_parameter(name)
        gathered = got.full_tensor() if isinstance(got, DTensor) else got
        if not torch.equal(gathered, want.to(kind or want.dtype)):
            different.append(name)
    ids = torch.arange(2 * 6).view(2, 6)
    with torch.no_grad():
        gap = (model(ids) - whole.to(kind or torch.float32)(ids)).abs().max().item()
    return {
        "different": different,
        "buffers": [name for name, b in whole.named_buffers() if not torch.equal(b, tensor_at(model, name)) and tensor == 1],
        "untied": [
            d.path
            for d in declared(model.part)
            if d.weight.same_as is not None and tensor_at(model, d.path) is not tensor_at(model, d.weight.same_as)
        ],
        "gap": gap,
        "values": sum(local(p).numel() for p in model.parameters()),
        "values whole": sum(p.numel() for p in whole.parameters()),
    }
