"""The tensor-parallel sharding of each weight, as a fold over declared axes. No tensors, no torch.

A **tensor-parallel region** (attention, an ffn) takes a replicated input and gives a partial sum on each rank. It shards the
axes that it defines itself and that are the major axis of one of its own weights: heads and kv_heads, ffn. No list names them.

    q.weight (heads·head, embed)      rows of whole heads              o.weight (embed, heads·head)   columns of whole heads
    k.weight (kv_heads·head, embed)   rows; fewer KV heads than ranks: ranks whose heads share a KV head hold the same rows
    q_norm.scale (head,)              replicated: `head` is not the major axis of any weight of the region
    table (heads, bucket)             rows, in every layer that shares it
    up (experts, ffn, embed)          whole experts: a batch of matrices comes before what is inside each
    embed.table (vocab, embed)        rows, as in the head: the parts declare `tp_axes`, since the model defines `vocab`

An axis that the output sums over (the `inp` of o and of down; experts) must be sharded evenly: a head on two ranks would count
twice. An axis that is only produced (kv_heads) may be held by several ranks, unless a reduction over it or a packing with other
axes needs all of it.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterable, Iterator, Sequence

from dovetail.base.errors import SpecError
from dovetail.spec.fold import Declared
from dovetail.spec.part import Part, walk, weights_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@dc.dataclass(frozen=True)
class TPRegion:
    """A tensor-parallel region: a part whose computation is sharded across ranks."""

    path: str
    part: Part
    shared_out: frozenset[str]  # the sharded axes
    summed: frozenset[str]  # those of them that must be sharded evenly, since the output sums over them
    reduced: tuple[tuple[str, str, int], ...] = ()  # (path, axis, size) of sharded axes over which a part inside reduces
    bounded: bool = True  # whether tensors enter and leave at its ends; else the part itself calls ctx.enter, leave and join

    def holds(self, path: str) -> bool:
        """Return whether the weight at this path is inside."""
        return path.startswith(f"{self.path}.")

    def check(self, ranks: int) -> None:
        """Raise SpecError where a part reduces over an axis of which several ranks hold the same piece."""
        for path, axis, size in self.reduced:
            if size % ranks and not ranks % size:  # what cannot be cut at all is refused as such
                problem = f"a norm over all of {axis} = {size} would count a piece more than once over {ranks} ranks"
                raise SpecError(path, problem, f"normalize each head by itself, or use {size} ranks or fewer")


@dc.dataclass(frozen=True)
class Cut:
    """A tensor sharded along `dim` in `pieces` equal shards: one per rank, or fewer, each then held by several ranks."""

    dim: int
    pieces: int

    def piece(self, rank: int, ranks: int) -> int:
        """Return which shard this rank holds."""
        return rank * self.pieces // ranks


def local_slices(
    shape: Sequence[int], cut: Cut | None, tensor: tuple[int, int] = (0, 1), data: tuple[int, int] = (0, 1)
) -> tuple[slice, ...]:
    """Return the slice of a tensor that one rank holds; `tensor` and `data` are (rank, number of ranks).

    Tensor parallelism shards along the dimension of the cut; FSDP then shards what is left along dimension 0, with shorter
    shards on the last ranks where it does not divide (torch.chunk).
    """
    ranges = [range(size) for size in shape]
    if cut is not None:
        ranges[cut.dim] = _chunk(ranges[cut.dim], cut.piece(*tensor), cut.pieces)
    if ranges:
        ranges[0] = _chunk(ranges[0], *data)
    return tuple(slice(r.start, r.stop) for r in ranges)


def _chunk(whole: range, index: int, count: int) -> range:
    size = -(-len(whole) // count)
    return whole[index * size : (index + 1) * size]


def tp_regions(
    part: Part, scope: Scope | None = None, path: str = "", whole: frozenset[str] = frozenset()
) -> Iterator[TPRegion]:
    """Yield every tensor-parallel region of a spec, in module order; axes in `whole` are not sharded."""
    outer = scope
    scope = part.axes((scope or Scope()).entered(path))
    if part.tp_region:
        own = scope.added - whole
        hits = [hit for weight in weights_of(part, scope) if (hit := major(weight, scope, own)) is not None]
        summed = {axis for dim, axis, weight in hits if _is_summed(dim, weight, scope, own)}
        shared = frozenset(axis for _, axis, _ in hits)
        reduced = (
            (at, axis, below.size(axis))
            for at, one, below in walk(part, outer, path)
            for axis in below.names(one.reduces)
            if axis in shared
        )
        yield TPRegion(path, part, shared, frozenset(summed), tuple(reduced))
        return
    if axes := frozenset(part.tp_axes) - whole:
        yield TPRegion(path, part, axes, axes, bounded=False)
        return
    for name, below in part.children().items():
        yield from tp_regions(below, part.child_scope(scope, name), f"{path}.{name}".lstrip("."), whole)


def _is_summed(dim: int, weight: Weight, scope: Scope, own: frozenset[str] | set[str]) -> bool:
    """Return whether the output sums over this dimension: a matmul reduces over it, or it is a batch of matrices (experts)
    whose outputs are added."""
    if dim < len(weight.batch):
        return own.isdisjoint(scope.names(weight.out))
    return dim == len(weight.batch) + bool(weight.out)


def major(weight: Weight, scope: Scope, among: Sequence[str] | set[str] | frozenset[str]) -> tuple[int, str, Weight] | None:
    """(dimension, axis, weight) for the first dimension whose major axis is one of `among`."""
    if weight.tp == "replicate":
        return None
    dims = [(axis,) for axis in weight.batch] + [axes for axes in (weight.out, weight.inp) if axes]
    made = range(len(weight.batch), len(dims) - 1) if weight.tp == "reduce" else ()  # what comes out is not shared out
    for dim, axes in enumerate(dims):
        axis = scope.names(axes)[0]
        if axis in among and dim not in made:
            return dim, axis, weight
    return None


def placed(
    tensors: Iterable[Declared], regions: Sequence[TPRegion], ranks: int
) -> list[tuple[Declared, TPRegion | None, Cut | None]]:
    """Return every tensor with the region that it is in and its sharding. Raises SpecError with the path of what cannot be
    sharded over so many ranks."""
    for tp_region in regions:
        tp_region.check(ranks)
    inside = [(d, next((region for region in regions if region.holds(d.path)), None)) for d in tensors]
    return [(d, tp_region, None if tp_region is None else cut_of(d, tp_region, ranks)) for d, tp_region in inside]


def cut_of(d: Declared, tp_region: TPRegion, ranks: int) -> Cut | None:
    """Return the sharding of a declared tensor of a region; None where it is replicated."""
    hit = major(d.weight, d.scope, tp_region.shared_out)
    if hit is None:
        if d.weight.tp != "replicate" and (shared := tp_region.shared_out & set(d.scope.names(d.weight.over))):
            axis = sorted(shared)[0]
            problem = f"is computed from all of {axis}, of which each of {ranks} tensor-parallel ranks has a shard"
            raise SpecError(
                d.path, problem, f"use lora, use one rank, or keep it whole: tensor_parallel(…, whole={{{axis!r}}})"
            )
        return None
    dim, axis, weight = hit
    size = d.scope.size(axis)
    if size % ranks == 0:
        return Cut(dim, ranks)
    if axis in tp_region.summed or ranks % size:
        problem = f"{axis} = {size} cannot be cut over {ranks} tensor-parallel ranks"
        remedy = f"make {axis} a multiple of {ranks}, use fewer ranks, or keep it whole: tensor_parallel(…, whole={{{axis!r}}})"
        raise SpecError(d.path, problem, remedy)
    if len(weight.out) > 2:
        problem = f"{' × '.join(weight.out)} packs what {ranks} ranks share out with {axis} = {size}, which they must share"
        raise SpecError(d.path, problem, f"unpack it, or use {size} ranks or fewer")
    return Cut(dim, size)
