"""Watch a program: the collectives, FLOPs and bytes of every operation, and the memory of all tensors alive.

    with Watch() as watch:
        trainer.step(batch, 0, lr)
    watch.cost, watch.peak                      the tensors may be fake: sizes are all that is read

Memory is counted by storage: from the operation that returns it to its last reference, with every change of its size (FSDP
frees and allocates the weights it gathers by resizing). A kernel's own scratch memory is not visible. A number that the program
reads from a fake tensor is 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dovetail.ops.tiles import LOOPS, KeyPiece, Tile, extent
from dovetail.planning.cost import Collective, MatrixProduct, RankGroup, StepCost

T = TypeVar("T")
ATEN = torch.ops.aten
COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
QUESTIONS = ("prim", "profiler")  # operations that compute nothing
SILENT = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")  # move no tensor
KINDS = {  # torch's names -> the field's
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "recv_": "receive",
}
Staging = Callable[[str, int], int]  # kind and bytes of a collective -> bytes that the backend allocates while it runs


def no_staging(kind: str, size: int) -> int:
    """Return 0: NCCL has buffers of its own, which are allocated once."""
    return 0


def gloo_staging(kind: str, size: int) -> int:
    """Return the bytes of the copy that gloo makes of what it reduces and scatters."""
    return size if kind == "reduce-scatter" else 0


class Watch(TorchDispatchMode):
    """Counts the cost of what runs inside it, by phase, and the most bytes alive in each segment of a phase."""

    def __init__(self, staging: Staging = no_staging) -> None:
        super().__init__()
        self.staging = staging
        self.phase, self.segment = "", ""
        self.counts: dict[str, StepCost] = {}
        self.peaks: dict[str, int] = {}  # segment -> the most bytes alive in it
        self.alive = 0
        self.sizes: dict[int, int] = {}  # storage -> bytes
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.groups: dict[str, RankGroup] = {}
        self.paused = 0
        self.times = 1  # as often as an operation counts
        self.outside = (torch.UntypedStorage.resize_, ShardingPropagator._fake_mode_lock)
        self.mark("start")

    def __enter__(self) -> Self:
        resize, watch = self.outside[0], self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            watch._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = self.pausing()  # type: ignore[assignment]  # held where DTensor derives shapes
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_, ShardingPropagator._fake_mode_lock = self.outside  # type: ignore[method-assign]

    @property
    def peak(self) -> int:
        """The most bytes alive at one time."""
        return max(self.peaks.values())

    def mark(self, phase: str) -> None:
        """Begin a phase, or continue it."""
        self.phase = phase
        self.counts.setdefault(phase, StepCost())
        self.mark_segment("")

    def mark_segment(self, name: str) -> None:
        """Begin a segment of the phase."""
        self.segment = f"{self.phase} {name}".strip()
        self.peaks[self.segment] = max(self.peaks.get(self.segment, 0), self.alive)

    def pausing(self) -> Paused:
        """Return the context in which operations do not count."""
        return Paused(self)

    @contextmanager
    def one_of_each(self) -> Iterator[None]:
        """The context in which tiled attention runs one tile and one piece of each kind, counted as often as there are such."""
        LOOPS.append(self._loop)
        try:
            yield
        finally:
            LOOPS.pop()

    def _loop(self, tiles: list[Tile], alike: Callable[[KeyPiece], Hashable]) -> Iterator[tuple[Tile, Iterable[KeyPiece]]]:
        for group in _grouped(tiles, lambda tile: extent(tile.queries)):
            pieces = [piece for tile in group for piece in tile.pieces]
            self.times = len(group)
            yield group[0], self._pieces(pieces, alike)
            self.times = 1

    def _pieces(self, pieces: list[KeyPiece], alike: Callable[[KeyPiece], Hashable]) -> Iterator[KeyPiece]:
        outside = self.times
        for first, *others in _grouped(pieces, alike):
            self.times = 1  # computes the mask of all
            yield first
            if others:
                self.times = len(others)
                yield others[0]
        self.times = outside

    def cost(self, phase: str) -> StepCost:
        """The cost of a phase."""
        return StepCost().plus(self.counts[phase])

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that exist already; return the bytes of those that were not counted yet."""
        before = self.alive
        for tensor in tensors:
            self._see_tensor(tensor)
        return self.alive - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor | AsyncCollectiveTensor) for one in types):
            return NotImplemented  # these first turn it into operations on local tensors, and collectives
        kwargs = kwargs or {}
        if func is ATEN._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is ATEN.detach.default and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():  # values that the host reads by x.numpy(force=True)
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.paused:
            return out
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._see_tensor(leaf)
        if func.namespace in COMMUNICATION:
            self._communicate(func, args, out)
        elif func.namespace not in QUESTIONS and not func.is_view:
            self._count(func, args, kwargs, out, leaves)
        return out

    def _communicate(self, func: Any, args: Any, out: Any) -> None:
        name = str(func._overloadpacket.__name__)
        if name in SILENT:
            return
        size = max(_bytes(one) for one in (*args, out))
        kind = KINDS.get(name, name)
        self.counts[self.phase].send(Collective(kind, self._group(args)), 1, size)
        self.peaks[self.segment] = max(self.peaks[self.segment], self.alive + self.staging(kind, size))

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, leaves: list[Tensor]) -> None:
        """Count an operation that is no view: FLOPs by torch's formulas, bytes of all its tensors."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        moved = sum(_size(tensor) for tensor in {id(tensor): tensor for tensor in (*given, *leaves)}.values())
        formula, cost = FLOPS.get(func._overloadpacket), self.counts[self.phase]
        if formula is not None:
            dtype = str(given[0].dtype).removeprefix("torch.")
            cost.products[MatrixProduct(dtype, formula(*args, **kwargs, out_val=out), moved)] += self.times
        elif moved:
            cost.kernels += self.times
            cost.moved += self.times * moved

    def _group(self, args: Any) -> RankGroup:
        """The group among the arguments of a collective: an object, or in functional collectives a name."""
        for arg in reversed(args):
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                return self._shape(ProcessGroup.unbox(arg))
            if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
                return self._shape(_resolve_process_group(GroupName(arg)))
        raise TypeError("a collective without a process group")

    def _shape(self, group: ProcessGroup) -> RankGroup:
        if group.group_name not in self.groups:
            ranks = dist.get_process_group_ranks(group)
            self.groups[group.group_name] = RankGroup(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        return self.groups[group.group_name]

    def _see_tensor(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.layout is torch.strided:
            self._see(local.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        reference = self.references.get(key)
        if reference is None or reference() is None:
            self.references[key] = weakref.ref(storage, lambda _: self._forget(key))
        size = storage.nbytes()
        self.alive += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peaks[self.segment] = max(self.peaks[self.segment], self.alive)

    def _forget(self, key: int) -> None:
        self.references.pop(key, None)
        self.alive -= self.sizes.pop(key, 0)


class Paused(AbstractContextManager[None]):
    """The context in which operations do not count. DTensor runs each on tensors of the whole shape, to learn the result's."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __enter__(self) -> None:
        self.watch.paused += 1

    def __exit__(self, *_: object) -> None:
        self.watch.paused -= 1


def _grouped(items: Iterable[T], kind: Callable[[T], Hashable]) -> Iterable[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return groups.values()


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    """Half of the pairs are visible to a causal kernel."""
    return sdpa_flop_count(q.shape, _heads(k, q), _heads(v, q)) // (2 if is_causal else 1)


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, is_causal: bool, **_: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, _heads(k, q), _heads(v, q)) // (2 if is_causal else 1)


def _heads(x: Tensor, like: Tensor) -> torch.Size:
    """The shape of keys or values with as many heads as the queries."""
    return torch.Size((x.shape[0], like.shape[1], *x.shape[2:]))


FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _bytes(argument: Any) -> int:
    """The bytes of all tensors in an argument."""
    return sum(_size(leaf) for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
