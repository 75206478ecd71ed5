"""Shard a model across ranks: tensor parallelism and FSDP. The only code that uses DTensor.

    ranks = tensor_parallel(model, spec, mesh["tensor"])        each rank holds its heads, its hidden units
    fully_shard_model(model, mesh["data"])                      each rank holds a slice of every weight, gathered for use

Tensor parallelism, for x replicated and a tensor-parallel region f of which rank r computes f_r:     y = Σ_r f_r(x)

    x ──enter── [ q k v → attend → o ] ──leave── y         enter all-reduces gradients; leave all-reduces outputs

Every parameter becomes a DTensor, sharded or replicated (optimizers and clipping refuse a mix), under its old name. While the
model runs, a module that reads its weight gets the local tensor of this rank; outside a run it gets the DTensor. A replicated
weight inside a region enters it as x does, since each rank computes a part of its gradient. A weight declared `once` is added
to a partial sum, so only rank 0 adds it.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dovetail.base.errors import SpecError
from dovetail.model.construction import tie
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import Absent, check_declared, held
from dovetail.nn.groups import HeadModule, Mixer
from dovetail.nn.module import entries, holder
from dovetail.nn.ranks import Ranks
from dovetail.parallel.collective import enter, join, largest, leave, time_collectives, total
from dovetail.parallel.context import RunRanks, TokenRanks
from dovetail.parallel.mesh import RankError
from dovetail.parallel.placement import Cut, TPRegion, placed, tp_regions
from dovetail.spec.fold import Declared
from dovetail.spec.part import Part

Read = Callable[[DTensor], Tensor]


class TensorRanks(RunRanks):
    """The ranks across which some axes are sharded. Every run of a sharded model sets it as `ctx.ranks.axes`."""

    def __init__(self, group: dist.ProcessGroup, axes: frozenset[str], stored: Mapping[str, Cut]) -> None:
        self.group, self.axes = group, axes
        self.stored = stored  # path -> how the tensor that a rank stores is cut; a path without one is stored whole
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.running = 0  # nested runs of the model in progress

    def sharded(self, axes: Sequence[str]) -> bool:
        """Return whether any of the axes is sharded."""
        return not self.axes.isdisjoint(axes)

    @property
    def cuts(self) -> dict[str, int]:
        """Return axis -> number of shards, which a Pool needs."""
        return dict.fromkeys(self.axes, self.count)

    def piece(self, pieces: int) -> int:
        """Return which of `pieces` equal shards of an axis this rank holds."""
        return self.rank * pieces // self.count

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        out = x.clone()
        dist.broadcast(out, group=self.group, group_src=0)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the all-reduced x, differentiable."""
        return total(x, self.group)

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Return x; its gradient is all-reduced."""
        return enter(x, self.group)

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """Return the all-reduced x; the gradient passes unchanged."""
        return leave(x, self.group)

    def gather_from_region(self, x: Tensor) -> Tensor:
        """Return x of all ranks, concatenated along the last dimension."""
        return join(x, -1, self.group)

    def max(self, x: Tensor) -> Tensor:
        """Return the largest x of all ranks, not differentiable."""
        return largest(x, self.group)

    def added_to(self, ctx: Ctx) -> Ctx:
        """Return the ctx with these ranks."""
        return dc.replace(ctx, ranks=Ranks(self, ctx.ranks.batch))

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within this context modules read the local tensors of this rank."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def live(self) -> bool:
        """Return whether the model runs; also true in a backward pass that recomputes checkpointed activations."""
        return self.running > 0 or torch._C._current_graph_task_id() != -1


# -- tensor parallel ------------------------------------------------------------------------------------------------


def tensor_parallel(model: nn.Module, spec: Part, mesh: DeviceMesh, whole: Collection[str] = ()) -> TensorRanks:
    """Shard a model across the ranks of a one-dimensional mesh, in place. All ranks must hold equal weights before.

    `whole` names axes that are not sharded: with {"vocab"} every rank holds the embedding and the head whole. Experts are
    sharded by expert (expert parallel); with {"experts"} every rank holds a slice of each of them instead."""
    if mesh.ndim != 1:
        raise RankError(f"tensor parallel takes one axis of a mesh, not {mesh.mesh_dim_names} (write mesh['tensor'])")
    check_declared(model, spec)
    found = list(tp_regions(spec, whole=frozenset(whole)))
    cuts = _cuts(model, spec, found, mesh.size())  # raises before anything changes
    axes = frozenset[str]().union(*(tp_region.shared_out for tp_region in found))
    ranks = TensorRanks(mesh.get_group(), axes, _stored(cuts, mesh.size()))
    reads: dict[nn.Module, dict[str, Read]] = {}
    for d, tp_region, cut in cuts:
        module, leaf = holder(model, d.path)
        if d.weight.buffer:
            if cut is not None:
                own = getattr(module, leaf).chunk(cut.pieces, cut.dim)[cut.piece(ranks.rank, ranks.count)]
                module.register_buffer(leaf, own.contiguous(), persistent=d.weight.stored)
            continue
        if d.weight.same_as is None:
            spread = Shard(ranks.stored[d.path].dim) if d.path in ranks.stored else Replicate()
            old = module.get_parameter(leaf)
            new = distribute_tensor(old.detach(), mesh, [spread], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(new, old.requires_grad))
        reads.setdefault(module, {})[leaf] = _reader(d, tp_region, cut, ranks)
    tie(model, spec)
    for module, by_name in reads.items():
        module._parameters = LocalParameters(module._parameters, by_name, ranks)
    for tp_region in (one for one in found if one.bounded):
        module = _module_at(model, tp_region.path)
        if module is not None:
            _bound(module, tp_region, ranks)
    run_with(model, ranks)
    model.ranks = Ranks(ranks)  # type: ignore[assignment]  # default contexts take it
    return ranks


def _stored(cuts: Iterable[tuple[Declared, TPRegion | None, Cut | None]], ranks: int) -> dict[str, Cut]:
    """Return path -> cut for every tensor of which a rank stores its shard alone. A parameter with fewer shards than ranks is
    stored whole, since the ranks that read the same shard train one copy of it."""
    return {d.path: cut for d, _, cut in cuts if cut is not None and (d.weight.buffer or cut.pieces == ranks)}


def _cuts(
    model: nn.Module, spec: Part, found: Sequence[TPRegion], ranks: int
) -> list[tuple[Declared, TPRegion | None, Cut | None]]:
    """Return every declared tensor with its region and its sharding; a tied weight must be sharded alike in all places."""
    cuts = placed(held(model, spec), found, ranks)
    by_path = {d.path: cut for d, _, cut in cuts}
    for d, _, cut in cuts:
        if d.weight.same_as is not None and cut != by_path[d.weight.same_as]:
            problem = f"is the same weight as {d.weight.same_as}, but tensor parallel cuts the two differently"
            raise SpecError(
                d.path, problem, "untie them, use one rank, or keep the axis whole: tensor_parallel(…, whole={'vocab'})"
            )
    return cuts


def _reader(d: Declared, tp_region: TPRegion | None, cut: Cut | None, ranks: TensorRanks) -> Read:
    """Return the function that reads the local tensor of this rank from the parameter."""
    partial = tp_region is not None and (tp_region.bounded or d.weight.tp == "inside")
    if tp_region is None or (cut is None and not partial):  # replicated computation: every rank has the same gradient
        return lambda weight: weight.to_local(grad_placements=[Replicate()])
    if cut is None and d.weight.tp == "once":
        share = float(ranks.rank == 0)
        return lambda weight: _entered(weight, ranks) * share
    if cut is None:
        return lambda weight: _entered(weight, ranks)
    if cut.pieces == ranks.count:
        return lambda weight: weight.to_local()
    own = cut.piece(ranks.rank, ranks.count)
    return lambda weight: _entered(weight, ranks).chunk(cut.pieces, cut.dim)[own]


def _entered(weight: DTensor, ranks: TensorRanks) -> Tensor:
    return enter(weight.to_local(grad_placements=[Replicate()]), ranks.group)


def _bound(module: nn.Module, tp_region: TPRegion, ranks: TensorRanks) -> None:
    """Hook the start and end of a region: x enters (and the encoder output, for a part that reads it, and every other
    floating-point input), the output leaves."""
    part = tp_region.part
    looks = isinstance(part, Mixer) and (part.reads_encoder() or part.starts_from_encoder())

    def begin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, ctx, *rest = args
        if looks and ctx.encoder_output is not None:
            ctx = dc.replace(ctx, encoder_output=enter(ctx.encoder_output, ranks.group))
        entered = (enter(a, ranks.group) if isinstance(a, Tensor) and a.is_floating_point() else a for a in rest)
        return enter(x, ranks.group), ctx, *entered

    def end(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return leave(out, ranks.group)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path; None where another rank has it."""
    at = model
    for name in path.split("."):
        at = at.get_submodule(name)
        if isinstance(at, Absent):
            return None
    return at


class LocalParameters(dict[str, Any]):
    """The parameters of a module. While the model runs, one that is read is the local tensor of this rank; outside of a run,
    and for whoever iterates over them (optimizers, checkpoints), it is the DTensor."""

    def __init__(self, parameters: Mapping[str, Any], reads: Mapping[str, Read], ranks: TensorRanks) -> None:
        super().__init__(parameters)
        self.reads, self.ranks = reads, ranks

    def __getitem__(self, name: str) -> Any:
        weight = super().__getitem__(name)
        return self.reads[name](weight) if name in self.reads and self.ranks.live() else weight


def run_with(model: nn.Module, ranks: RunRanks) -> None:
    """Make every run of the model one with these ranks: they are set in every ctx."""
    for name in ("forward", *entries(type(model), nested=True)):
        setattr(model, name, MethodType(_with(getattr(model, name).__func__, ranks), model))


def _with(method: Callable[..., Any], ranks: RunRanks) -> Callable[..., Any]:
    """A method that runs with ranks: they are set in every ctx that it is given."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        with ranks.run():
            given = [_with_ranks(a, ranks) for a in args]
            return method(self, *given, **{key: _with_ranks(a, ranks) for key, a in named.items()})

    return run


def _with_ranks(argument: Any, ranks: RunRanks) -> Any:
    return ranks.added_to(argument) if isinstance(argument, Ctx) else argument


# -- FSDP -----------------------------------------------------------------------------------------------------------


def fully_shard_model(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None, rows: dist.ProcessGroup | None = None
) -> None:
    """Shard every weight across the ranks of a one-dimensional mesh, in place; each layer gathers its own while it runs. With a
    mesh (replicas, shards), each replica does so, and gradients are reduced over both.

    Gradients are means over the ranks. `dtype` is what the layers compute in; gradients are then summed in float32. Cut by
    tensor first, where both are wanted. Each rank runs rows of its own, of the layout `layout.split_rows(ranks, rank)`, which
    numbers samples over all ranks: dropout differs by these numbers. Losses that routers add are those of the whole batch.
    `rows` are the ranks with other rows, where they are not those of the mesh.
    """
    warnings.filterwarnings("ignore", ".*returned a view tensor.*")  # of values that later layers read, and do not change
    run_with(model, TokenRanks(data=mesh.get_group() if rows is None else rows))
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in units(model):
        for head in (module for layer in unit for module in layer.modules() if isinstance(module, HeadModule)):
            fully_shard(head, mesh=mesh, mp_policy=policy)  # the own head of a depth is called behind the depth
            _gather_for_entries(head)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        for layer in unit:
            _gather_for_entries(layer)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    time_collectives(model)
    _gather_for_entries(model)


def _gather_for_entries(module: nn.Module) -> None:
    """Let every entry gather the weights of a module, as its forward pass does."""
    for name in entries(type(module)):
        register_fsdp_forward_method(module, name)


def reshard(model: nn.Module) -> None:
    """Free what FSDP has gathered, so that the next run gathers anew: after weights were changed between two runs."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def units(model: nn.Module) -> list[list[nn.Module]]:
    """Return the FSDP units: one per layer; layers that share a weight form one unit, or each would train a copy."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for layer in _layers(model):
        weights = {id(p) for p in layer.parameters()}
        joined = [unit for unit in found if unit[1] & weights]
        found = [unit for unit in found if not unit[1] & weights]
        found.append(([m for unit in joined for m in unit[0]] + [layer], weights.union(*(unit[1] for unit in joined))))
    return [modules for modules, _ in found]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Return the members of the outermost module lists."""
    for below in module.children():
        if isinstance(below, nn.ModuleList):
            yield from (layer for layer in below if not isinstance(layer, Absent))
        else:
            yield from _layers(below)
