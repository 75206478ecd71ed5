"""A model over ranks: tensor parallel and FSDP, the only code that knows DTensor.

    ranks = tensor_parallel(model, spec, mesh["tensor"])        each rank: its heads, its hidden units
    fully_shard_model(model, mesh["data"])                      each rank: a slice of every weight, gathered where it is used

Tensor parallel, for x whole on every rank and a region f that rank r computes on its share:     y = Σ_r f_r(x)

    stream ──enter── [ q k v → attend → o ] ──leave── stream         enter: gradients are summed; leave: outputs are summed

Every parameter becomes a DTensor, cut or whole (optimizers and clipping refuse a mixture), under its old name. While the model
runs, a module that asks for its weight gets what this rank works with, as a plain tensor; outside a run it gets the DTensor.
A weight that is whole but inside a region enters it as the stream does: each rank has a share of its gradient. One declared
`once` is added to a sum that is still partial, so rank 0 alone adds it.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.fold import Declared, declared
from dovetail.core.group import Mixer
from dovetail.core.module import holder
from dovetail.core.part import Part
from dovetail.dist.collective import enter, leave, total
from dovetail.dist.mesh import RankError
from dovetail.dist.place import Cut, TPRegion, cut_of, tp_regions

ENTRIES = ("loss", "encode", "fill")  # the methods by which a model is run, beside forward
INNER = ("hidden",)  # and one that those go through, which may be called by itself where there is no FSDP
Read = Callable[[DTensor], Tensor]


class TensorRanks:
    """The ranks that share out some axes; a Ctx's `ranks`, which every run of a sharded model is given by itself."""

    def __init__(self, group: dist.ProcessGroup, axes: frozenset[str]) -> None:
        self.group, self.axes = group, axes
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.running = 0  # how many runs of the model are under way, one inside the other

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether any of the axes is cut."""
        return not self.axes.isdisjoint(axes)

    @property
    def cuts(self) -> dict[str, int]:
        """Axis -> over how many ranks it is shared out; what a Pool must know of them."""
        return dict.fromkeys(self.axes, self.count)

    def piece(self, pieces: int) -> int:
        """Return the number of the piece that this rank has of an axis in `pieces` equal ones."""
        return self.rank * pieces // self.count

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        out = x.clone()
        dist.broadcast(out, group=self.group, group_src=0)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with its gradient."""
        return total(x, self.group)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within this context modules see what this rank works with."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def live(self) -> bool:
        """Whether the model runs; also in backward, where checkpointed work is done again."""
        return self.running > 0 or torch._C._current_graph_task_id() != -1


# -- tensor parallel ------------------------------------------------------------------------------------------------


def tensor_parallel(model: nn.Module, spec: Part, mesh: DeviceMesh, whole: Collection[str] = ()) -> TensorRanks:
    """Cut a model over the ranks of a mesh of one axis, in place. Every rank must hold the same weights to begin with.

    `whole` names axes that no rank shares out. Experts are shared out between the ranks (expert parallel); with
    whole={"experts"} every rank holds a slice of each of them instead."""
    if mesh.ndim != 1:
        raise RankError(f"tensor parallel takes one axis of a mesh, not {mesh.mesh_dim_names} (write mesh['tensor'])")
    found = list(tp_regions(spec, whole=frozenset(whole)))
    cuts = _cuts(spec, found, mesh.size())  # every error comes before any change
    ranks = TensorRanks(mesh.get_group(), frozenset().union(*(tp_region.shared_out for tp_region in found)))
    reads: dict[nn.Module, dict[str, Read]] = {}
    for d, tp_region, cut in cuts:
        module, leaf = holder(model, d.path)
        if d.weight.buffer:
            if cut is not None:
                own = getattr(module, leaf).chunk(cut.pieces, cut.dim)[cut.piece(ranks.rank, ranks.count)]
                module.register_buffer(leaf, own.contiguous(), persistent=d.weight.stored)
            continue
        if d.weight.same_as is None:
            spread = Replicate() if cut is None or cut.pieces < ranks.count else Shard(cut.dim)
            old = module.get_parameter(leaf)
            new = distribute_tensor(old.detach(), mesh, [spread], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(new, old.requires_grad))
        reads.setdefault(module, {})[leaf] = _reader(d, tp_region, cut, ranks)
    for d, _, _ in cuts:
        if d.weight.same_as is not None:
            module, leaf = holder(model, d.path)
            owner, name = holder(model, d.weight.same_as)
            module.register_parameter(leaf, owner.get_parameter(name))
    for module, by_name in reads.items():
        module.__class__ = _seeing_local(type(module), tuple(by_name))
        module.local_reads, module.local_ranks = by_name, ranks  # type: ignore[assignment]
    for tp_region in found:
        _bound(model.get_submodule(tp_region.path), tp_region, ranks)
    model.__class__ = _run_local(type(model))
    model.local_ranks = ranks  # type: ignore[assignment]
    return ranks


def _cuts(spec: Part, found: Iterable[TPRegion], ranks: int) -> list[tuple[Declared, TPRegion | None, Cut | None]]:
    """Every declared tensor with its region and how it is cut; a shared one must be cut alike wherever it is used."""
    placed = [(d, next((tp_region for tp_region in found if tp_region.holds(d.path)), None)) for d in declared(spec)]
    cuts = [(d, tp_region, cut_of(d, tp_region, ranks)) for d, tp_region in placed]
    by_path = {d.path: cut for d, _, cut in cuts}
    for d, _, cut in cuts:
        if d.weight.same_as is not None and cut != by_path[d.weight.same_as]:
            problem = f"is the same weight as {d.weight.same_as}, but tensor parallel cuts the two differently"
            raise SpecError(d.path, problem, "untie them, or use one rank")
    return cuts


def _reader(d: Declared, tp_region: TPRegion | None, cut: Cut | None, ranks: TensorRanks) -> Read:
    """What this rank works with, out of the parameter."""
    if tp_region is None:  # every rank does the same with it and finds the same gradient
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
    """Where a region begins and ends: the stream enters (and the memory, for a part that looks at it, and whatever else of
    real numbers the part is given), the output leaves."""
    looks = isinstance(tp_region.part, Mixer) and tp_region.part.reads_encoder()

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


@functools.cache
def _seeing_local(cls: type[nn.Module], names: tuple[str, ...]) -> Any:
    """The class whose attributes of these names are what this rank works with while the model runs."""

    def attribute(name: str) -> property:
        def read(self: Any) -> Tensor:
            weight = self._parameters[name]
            return self.local_reads[name](weight) if self.local_ranks.live() else weight

        return property(read)

    return type(f"Local{cls.__name__}", (cls,), {name: attribute(name) for name in names})


@functools.cache
def _run_local(cls: type[nn.Module]) -> Any:
    """The class whose entries put the ranks in the Ctx they are given, and let modules see local weights meanwhile."""

    def entry(name: str) -> Callable[..., Any]:
        method = getattr(cls, name)

        @functools.wraps(method)
        def run(self: Any, *args: Any, **named: Any) -> Any:
            ranks = self.local_ranks
            with ranks.run():
                given = [_with_ranks(a, ranks) for a in args]
                return method(self, *given, **{key: _with_ranks(a, ranks) for key, a in named.items()})

        return run

    return type(f"Run{cls.__name__}", (cls,), {name: entry(name) for name in ("forward", *ENTRIES, *INNER)})


def _with_ranks(argument: Any, ranks: TensorRanks) -> Any:
    return dc.replace(argument, ranks=ranks) if isinstance(argument, Ctx) else argument


# -- FSDP -----------------------------------------------------------------------------------------------------------


def fully_shard_model(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Cut every weight over the ranks of a mesh of one axis, in place; each layer gathers its own while it runs.

    Gradients are means over the ranks. `dtype` is what the layers compute in; gradients are then summed in float32. Cut by
    tensor first, where both are wanted.
    """
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for name in ENTRIES:
        register_fsdp_forward_method(model, name)


def units(model: nn.Module) -> list[list[nn.Module]]:
    """The layers, each a unit; layers that share a weight are one unit, or each would go on with a copy of its own."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for layer in _layers(model):
        weights = {id(p) for p in layer.parameters()}
        joined = [unit for unit in found if unit[1] & weights]
        found = [unit for unit in found if not unit[1] & weights]
        found.append(([m for unit in joined for m in unit[0]] + [layer], weights.union(*(unit[1] for unit in joined))))
    return [modules for modules, _ in found]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules."""
    for below in module.children():
        if isinstance(below, nn.ModuleList):
            yield from below
        else:
            yield from _layers(below)
